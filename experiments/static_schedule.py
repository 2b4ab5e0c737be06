"""The static schedule of a TPU kernel, as libtpu's compiler dumps it, and what one step of its grid costs.

The core issues one bundle a cycle, in order. The dump of the final bundles gives the instructions of each, the loops
and the branches; that of the utilization gives how many slots of each unit every bundle fills. Bundles alone flatter a
kernel: a matrix product's operands pass through the MXU at four rows a cycle, however densely they are scheduled. So
the estimate of a step is the larger of its bundles and of its MXU rows over that rate.

A kernel's program is a loop over the grid whose body has branches: variants of the step itself (with the mask, and
without), and what only the first or the last step of a row of blocks does. Variants do the same products, which is how
they are told from the rest. Loops inside count as often as they run.

Slots of instructions that the compiler hoisted into the last bundles of a loop, to be executed once on leaving it,
count in every turn (except MXU rows, which are counted once); they are few.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

MXU_ROWS_PER_CYCLE = 4.0
"""Of one core of v5e, v5p and v6e: a row is a vector of contraction entries going in and as many outputs coming out."""

ROWS = {"f32": 8, "bf16": 16, "s8": 32, "u8": 32, "f8e4m3": 32, "f8e5m2": 32}
"""Rows that one matrix instruction takes, by the type of its operand: a register of 8 sublanes of 32 bits. Those marked
"lmr" give half the results, and count half."""

DELAY_SLOTS = 4
"""Bundles after a branch that are executed whether it is taken or not."""

SAME_PRODUCTS = 0.02
"""By how much the MXU rows of two variants of one step may differ, relative to the larger."""


class ScheduleError(ValueError):
    """A dump that is not in the format this module knows; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A stretch of bundles with the loops and branches inside it.

    Fields:
      kind: "program", "grid" (the loop over the grid), "loop" or "branch" (executed or skipped as a whole).
      start, end: its bundles, the last not included.
      trips: how often a loop runs its body; None if the program does not say, or for other kinds.
      skipped_if: of a branch, the predicate under which it is skipped.
      children: in order, not overlapping.
    """

    kind: str
    start: int
    end: int
    trips: int | None = None
    skipped_if: str = ""
    children: tuple["Node", ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's program.

    Fields:
      columns: what ``table`` counts: "bundles", "rows" (of the MXU), "weight_pushes", then the slots of each unit.
      capacity: slots of each unit in a bundle.
      table: float64 [bundles, columns].
      root: the whole program.
      notes: what could not be told from the dump, in words.
    """

    columns: tuple[str, ...]
    capacity: dict[str, int]
    table: np.ndarray
    root: Node
    notes: tuple[str, ...]


class Work(NamedTuple):
    """What some path through a program executes.

    Fields:
      columns: as of the schedule.
      pieces: [pieces, columns], the stretches between which nothing can be scheduled together, since a loop or a branch
        begins or ends there; those of a loop counted as often as it runs.
    """

    columns: tuple[str, ...]
    pieces: np.ndarray

    def __getitem__(self, column: str) -> float:  # type: ignore[override]
        return float(self.pieces[:, self.columns.index(column)].sum())

    def cycles(self) -> float:
        return max(self["bundles"], self["rows"] / MXU_ROWS_PER_CYCLE)


class Step(NamedTuple):
    """One step of the grid.

    Fields:
      variants: the work of each variant, the one with the least arithmetic (VALU slots) first: of an attention kernel
        the first is an interior step, without a mask, the last one on the diagonal. The cheaper schedule may be either.
      others: branches outside the variants with their work: executed in the first or last step of a row of blocks.
      notes: what could not be told from the dump, in words.
    """

    variants: list[Work]
    others: list[tuple[Node, Work]]
    notes: list[str]


# Reading --------------------------------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+[A-Z ]*:\s*>*\s*\{")
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_BRANCH = re.compile(r"\bsbr\.\w+\s*(?:\((!?%[\w.]+)\))?[^;}]*?target = \$region(\d+)")
_PRODUCT = re.compile(r"\bvmatmul([\w.]*)(?: \((!?%[\w.]+)\))?")
_SCALAR = re.compile(r"(%[sp][\w.]*) = (scmp|sadd|sphi|smov|sld)([\w.]*) ([^;}]*)")
_SPILL = re.compile(r"sst \[smem:\[(#allocation\w+_spill)\]\] (%[\w.]+)")


def parse(bundles: str, utilization: str) -> Schedule:
    """The program of the dumps ``*-final_bundles.txt`` and ``*-final_hlo-static-per-bundle-utilization.txt``."""
    texts = _bundle_texts(bundles)
    capacity, slots = _utilization(utilization)
    if len(texts) != len(slots):
        raise ScheduleError(f"{len(texts)} bundles, but the utilization of {len(slots)}")
    loops, branches, notes = _control(texts)
    rows, pushes = _products(texts, loops)
    columns = ("bundles", "rows", "weight_pushes", *capacity)
    table = np.column_stack([np.ones(len(texts)), rows, pushes, slots]).astype(np.float64)
    nested = _nest(Node("program", 0, len(texts)), [*loops, *branches])
    return Schedule(columns, capacity, table, nested, tuple(notes))


def _bundle_texts(text: str) -> list[str]:
    """One string a bundle; comments of some instructions run over several lines."""
    texts: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            texts.append(line)
        elif texts:
            texts[-1] += "\n" + line
    if not texts:
        raise ScheduleError("no bundles in the dump of the final bundles")
    return texts


def _utilization(text: str) -> tuple[dict[str, int], np.ndarray]:
    lines = [line.strip() for line in text.splitlines()]
    names = next((i for i, line in enumerate(lines) if line.startswith("MXU")), None)
    if names is None:
        raise ScheduleError("no line of unit names, MXU first, in the dump of the utilization")
    units = [name.strip() for name in lines[names].split(",")]
    numbers = [line.split() for line in lines[names + 1 :] if re.fullmatch(r"\d+(\s+\d+)*", line)]
    if len(numbers) < 2 or any(len(row) != len(units) for row in numbers):
        raise ScheduleError(f"the dump of the utilization has no row of {len(units)} numbers for each bundle")
    table = np.asarray(numbers, dtype=np.float64)
    return dict(zip(units, (int(x) for x in table[0]), strict=True)), table[1:]


def _control(texts: list[str]) -> tuple[list[Node], list[Node], list[str]]:
    """The loops and the branches, not nested yet, and notes."""
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    scalars: dict[str, tuple[str, str, str]] = {}
    spilled: dict[str, str] = {}
    for i, text in enumerate(texts):
        for kind, region in _REGION.findall(text):
            if kind != "End":
                start.setdefault(region, i)
            if kind != "Start":
                end[region] = i
        for name, *definition in _SCALAR.findall(text):
            scalars[name] = (definition[0], definition[1], definition[2])
        for place, name in _SPILL.findall(text):
            spilled[place] = name
    for name, (operation, _, arguments) in list(scalars.items()):
        place = re.match(r"\[smem:\[(#allocation\w+_spill)\]\]", arguments) if operation == "sld" else None
        if place is not None and spilled.get(place[1]) in scalars:
            scalars[name] = scalars[spilled[place[1]]]
    loops, branches, notes = [], [], []
    for i, text in enumerate(texts):
        for predicate, region in _BRANCH.findall(text):
            if region not in start:
                notes.append(f"bundle {i} branches to region {region}, which is not marked; taken as not branching")
                continue
            target = start[region]
            if target <= i:
                last = max(end.get(region, i), i)
                kind = "grid" if "iteration index" in texts[target] else "loop"
                trips = None if kind == "grid" else _trips(predicate, scalars)
                loops.append(Node(kind, target, min(last + 1, len(texts)), trips, predicate.removeprefix("!")))
            elif i + 1 + DELAY_SLOTS < target:
                branches.append(Node("branch", i + 1 + DELAY_SLOTS, target, None, predicate))
    return loops, branches, notes


def _trips(predicate: str, scalars: dict[str, tuple[str, str, str]]) -> int | None:
    """How often a loop runs that branches back under ``predicate``; None where its bounds are not constants."""
    negated, name = predicate.startswith("!"), predicate.removeprefix("!")
    operation, suffix, arguments = scalars.get(name, ("", "", ""))
    compared = re.match(r"(?:\(!?%[\w.]+\), )?(%[\w.]+), (-?\d+)", arguments)
    relation = suffix.split(".")[1] if suffix.count(".") else ""
    if operation != "scmp" or compared is None or relation not in (("ge", "gt") if negated else ("lt", "le")):
        return None
    bound = int(compared[2]) + (relation in ("gt", "le"))
    operation, _, arguments = scalars.get(compared[1], ("", "", ""))
    added = re.match(r"(?:(\d+), (%[\w.]+)|(%[\w.]+), (\d+))", arguments)
    if operation != "sadd" or added is None:
        return None
    step, counter = int(added[1] or added[4]), added[2] or added[3]
    operation, _, arguments = scalars.get(counter, ("", "", ""))
    first = re.match(r"(%[\w.]+), ", arguments)
    if operation != "sphi" or first is None:
        return None
    operation, _, arguments = scalars.get(first[1], ("", "", ""))
    begin = re.match(r"(?:\(!?%[\w.]+\), )?(-?\d+)", arguments)
    if operation != "smov" or begin is None or step < 1:
        return None
    return max(1, -(-(bound - int(begin[1])) // step))


def _products(texts: list[str], loops: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """MXU rows and weight pushes of each bundle.

    A product under the exit predicate of a loop around it is hoisted into its last turn: it counts behind the loop.
    """
    rows, pushes = np.zeros(len(texts)), np.zeros(len(texts))
    for i, text in enumerate(texts):
        pushes[i] = text.count("vmatpush")
        for mnemonic, predicate in _PRODUCT.findall(text):
            kind = next((part for part in mnemonic.split(".") if part in ROWS), None)
            if kind is None:
                raise ScheduleError(f"bundle {i}: how many rows vmatmul{mnemonic} takes is not known")
            around = [loop for loop in loops if loop.start <= i < loop.end and loop.skipped_if == predicate != ""]
            at = min((loop.end for loop in around), default=i)
            rows[min(at, len(texts) - 1)] += ROWS[kind] / (2 if "lmr" in mnemonic.split(".") else 1)
    return rows, pushes


def _nest(node: Node, inside: list[Node]) -> Node:
    """``node`` with those of ``inside`` that it holds as children, themselves nested."""
    order = sorted(inside, key=lambda n: (n.start, -n.end))
    children: list[Node] = []
    while order:
        first, *order = order
        held = [n for n in order if n.start < first.end]
        if any(n.end > first.end for n in held):
            raise ScheduleError(f"the {first.kind} at bundles {first.start} to {first.end} overlaps another one")
        order = [n for n in order if n.start >= first.end]
        children.append(_nest(first, held))
    return dataclasses.replace(node, children=tuple(children))


# Counting -------------------------------------------------------------------------------------------------------------


def step(schedule: Schedule) -> Step:
    """The work of one step of the grid; of the whole program where it has no loop over a grid."""
    node = next((n for n in walk(schedule.root) if n.kind == "grid"), schedule.root)
    others: list[tuple[Node, Work]] = []
    unknown = [n for n in walk(node) if n.kind == "loop" and n.trips is None]
    notes = [*schedule.notes]
    notes += [f"the loop at bundles {n.start} to {n.end} has no constant bounds and counts once" for n in unknown]
    variants = [Work(schedule.columns, p) for p in _paths(schedule, node, others)]
    return Step(sorted(variants, key=lambda work: (work["VALU"], work["bundles"])), others, notes)


def walk(node: Node) -> Iterator[Node]:
    """The node and everything in it, in order."""
    yield node
    for child in node.children:
        yield from walk(child)


def straight(schedule: Schedule, node: Node) -> Work:
    """What one turn of a node executes outside its loops and branches."""
    ends = [(child.start, child.end) for child in node.children]
    between = zip([node.start, *(end for _, end in ends)], [*(start for start, _ in ends), node.end], strict=True)
    return Work(schedule.columns, np.stack([schedule.table[a:b].sum(axis=0) for a, b in between]))


def _paths(schedule: Schedule, node: Node, others: list[tuple[Node, Work]]) -> list[np.ndarray]:
    """The pieces of one turn of a node, for each variant that its branches leave; other branches go to ``others``."""
    paths = [straight(schedule, node).pieces]
    for loop in (n for n in node.children if n.kind != "branch"):
        paths = [np.concatenate([p, (loop.trips or 1) * q]) for p in paths for q in _paths(schedule, loop, others)]
    # Branches skipped under the same predicate are one branch in pieces.
    groups: dict[str, list[Node]] = {}
    for branch in (n for n in node.children if n.kind == "branch"):
        groups.setdefault(branch.skipped_if or f"at {branch.start}", []).append(branch)
    rows = schedule.columns.index("rows")
    found = []
    for branches in groups.values():
        inner: list[tuple[Node, Work]] = []
        alternatives = [np.zeros((0, len(schedule.columns)))]
        for branch in branches:
            alternatives = [np.concatenate([p, q]) for p in alternatives for q in _paths(schedule, branch, inner)]
        found.append((max(p[:, rows].sum() for p in alternatives), branches, alternatives, inner))
    most = max((f[0] for f in found), default=0.0)
    # A branch with few products beside the straight part's is a beginning or an end, not the step.
    is_step = most > 0.1 * max(p[:, rows].sum() for p in paths)
    chosen: list[np.ndarray] = []
    for products, branches, alternatives, inner in found:
        others.extend(inner)
        if is_step and products >= (1 - SAME_PRODUCTS) * most:
            chosen.extend(alternatives)
        else:
            cheapest = min(alternatives, key=lambda p: p[:, 0].sum())
            others.append((branches[0], Work(schedule.columns, cheapest)))
    return [np.concatenate([p, q]) for p in paths for q in chosen] if chosen else paths
