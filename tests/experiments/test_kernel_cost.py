"""The reader of schedules on a program written by hand, in the format of libtpu's dump; the command's refusals."""

import importlib.util
import json

import numpy as np
import pytest

from experiments import compiled_cost
from experiments.static_schedule import ScheduleError, parse, step, walk
from tests.experiments.test_commands import check_refusal, command  # noqa: F401

UNITS = ["MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU"]
CAPACITY = [4, 3, 4, 2, 1, 3, 3, 1, 1, 2]
BF16 = "%v9 = vmatmul.bf16.gmra.mxu0 %v1"  # 16 rows
HEADER = "= control target key start\nLH: loop header\nLB: loop body\n= control target key end\n\n"


class Program:
    """Bundles with the slots they fill, appended one by one."""

    def __init__(self):
        self.lines, self.slots = [], []

    def add(self, *instructions, mark="", comment="", times=1, **slots):
        for _ in range(times):
            at = f"{len(self.lines):#x}" if self.lines else "0"
            comment_text = f" /* {comment} */" if comment else ""
            self.lines.append(f"{at:>6} {mark:2}: > {{ {'  ;;  '.join(instructions)} }}{comment_text}")
            self.slots.append([slots.get(name.replace(":", "_"), 0) for name in UNITS])

    def branch(self, predicate, region, *instructions):
        self.add(f"%7 = sbr.rel ({predicate}) target = $region{region}", *instructions)

    def loop(self, region, trips, products, *last, first=0, by=1, idle=0, spilled=False, **slots):
        """A bundle for each product, idle ones, then the branch back and its four delay slots."""
        n = region
        self.add(f"%s{n}0_s1 = smov {first} /* copy */")
        counter, place = f"%s{n}1_s1", f"[smem:[#allocation{n}_spill]]"
        if spilled:
            counter, last = f"%s{n}4_s1", (f"sst {place} %s{n}1_s1", f"%s{n}4_s1 = sld {place}", *last)
        self.add(BF16, f"%s{n}1_s1 = sphi %s{n}0_s1, %s{n}2_s2 /* phi */", f"%s{n}2_s2 = sadd.s32 {by}, {counter}",
                 f"%p{n}3_p4 = scmp.ge.s32.totalorder %s{n}2_s2, {trips} /* loop exit test */", mark="LB",
                 comment=f"Start region {n} :: Start region {n}9", **slots)  # fmt: skip
        self.add(BF16, times=products - 1, **slots)
        self.add(times=idle)
        self.branch(f"!%p{n}3_p4", n)
        self.add(times=3)
        self.add(*last, comment=f"End region {n}")

    def texts(self):
        rows = [" ".join(map(str, row)) for row in self.slots]
        numbers = "\n".join([" ".join(f"{c:>5}" for c in CAPACITY), "== UTILIZATION:", *rows])
        return HEADER + "\n".join(self.lines), f"== CAPACTIY:\n{', '.join(UNITS)}\n{numbers}\n"


def attention(turns):
    """A grid of steps: a beginning of 10 bundles, a variant with the mask, one without, an end of 7.

    The one without has less arithmetic and, as happens, the longer schedule.
    """
    p = Program()
    p.add(times=5)
    p.add("%s1_s1 = sphi %s2, %s3 /* iteration index, stage = 0 */", mark="LB", comment="Start region 1")
    p.branch("%p10_p1", 10)
    p.add(times=4)  # delay slots
    p.add(times=10, VSTORE=1)
    p.add(mark="PF", comment="Start/End empty region 10")
    p.branch("%p20_p2", 20)
    p.add(times=4)
    p.loop(21, turns, 34, VALU=3, VLOAD=2, VLOAD_FILL=1)
    p.branch("%p30_p3", 30)  # the fallthrough of one branch holds the next
    p.lines[-1] += " /* Start/End empty region 20 */"
    p.add(times=4)
    p.loop(31, turns, 34, idle=2, VALU=2, VLOAD=2, VLOAD_FILL=1)
    p.add(mark="PF", comment="Start/End empty region 30")
    p.branch("%p40_p4", 40)
    p.add(times=4)
    p.add("%8 = vmatmul.f32.gmra.mxu1 %v1")  # a product, but hardly any beside the step's
    p.add(times=6, VSTORE=1)
    p.add(mark="PF", comment="Start/End empty region 40")
    p.add("%p5_p5 = scmp.ge.s32.totalorder %s2, 66 /* loop exit test */")
    p.branch("!%p5_p5", 1)
    p.add(times=4)
    return p


def test_loops_count_as_often_as_they_run():
    for turns in (3, 8):
        found = step(parse(*attention(turns).texts()))
        interior, diagonal = found.variants
        # Outside: the grid's header, four branches with their delay slots and three fallthroughs, the test and the
        # branch back; the step's own: the loop's counter.
        outside = 1 + 4 * 5 + 3 + 2
        assert interior["bundles"] == outside + 1 + turns * (34 + 2 + 5)
        assert diagonal["bundles"] == outside + 1 + turns * (34 + 5)
        assert interior["rows"] == turns * 34 * 16
        assert (interior["VALU"], diagonal["VALU"]) == (2 * turns * 34, 3 * turns * 34)
        assert [work["bundles"] for _, work in found.others] == [10, 7]
        assert found.notes == []


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize(
    ("bound", "first", "by", "turns"), [(32, 0, 1, 32), (32, 2, 1, 30), (10, 0, 4, 3), (1, 5, 1, 1)]
)
def test_the_bounds_of_a_loop(bound, first, by, turns, spilled):
    p = Program()
    p.loop(3, bound, 6, first=first, by=by, spilled=spilled)
    (loop,) = (node for node in walk(parse(*p.texts()).root) if node.kind == "loop")
    assert (loop.trips, loop.end - loop.start) == (turns, 11)


def test_a_loop_of_unknown_length_is_said_to_count_once():
    p = Program()
    p.loop(3, 8, 6)
    p.lines[0] = p.lines[0].replace("smov 0", "sld [smem:4]")
    found = step(parse(*p.texts()))
    assert found.variants[0]["bundles"] == 12
    assert found.notes == ["the loop at bundles 1 to 12 has no constant bounds and counts once"]


def test_a_product_hoisted_for_the_exit_of_a_loop_counts_once():
    p = Program()
    p.loop(3, 8, 6, BF16.replace(" %v1", " (%p33_p4), %v1"))
    p.add()
    assert step(parse(*p.texts())).variants[0]["rows"] == (8 * 6 + 1) * 16


def test_phases_of_a_step_add_up():
    """Branches under one predicate are all executed or all skipped, unlike variants."""
    p = Program()
    for region in (3, 4):
        p.branch("%p1_p1", region)
        p.add(times=4)
        p.add(BF16, times=5 * region)
        p.add(mark="PF", comment=f"Start/End empty region {region}")
    found = step(parse(*p.texts()))
    assert [work["rows"] for work in found.variants] == [35 * 16]
    assert found.others == []


def test_comments_over_several_lines_and_unmarked_regions():
    bundles, utilization = attention(4).texts()
    one = step(parse(bundles, utilization))
    bundles = bundles.replace("iteration index,", "bounds: (6, 1)\nstrides: (6, 1) */ /* iteration index,")
    assert step(parse(bundles, utilization)).variants[0]["bundles"] == one.variants[0]["bundles"]
    notes = step(parse(bundles.replace("Start/End empty region 40", "nothing"), utilization)).notes
    assert len(notes) == 1
    assert "region 40, which is not marked" in notes[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("MXU, XLU", "XLU", "no line of unit names"),
        ("\n0 0 0 0 0 0 0 0 0 0", "", "but the utilization of"),
        ("0 0 0\n", "0 0\n", "no row of 10 numbers"),
        ("vmatmul.bf16", "vmatmul.f4", "how many rows vmatmul.f4.gmra.mxu0 takes is not known"),
        ("{", "<", "no bundles"),
    ],
)
def test_a_dump_in_another_format_is_refused(old, new, message):
    bundles, utilization = (text.replace(old, new) for text in attention(2).texts())
    with pytest.raises(ScheduleError, match=message):
        parse(bundles, utilization)


def test_bounds_leave_out_spills():
    schedule = parse(*attention(5).texts())
    bounds = compiled_cost.unit_bounds(step(schedule).variants[0], schedule.capacity, positions=170)
    assert bounds["MXU"] == 5 * 34 * 16 / 4 / 170
    assert bounds["VALU"] == 2 / 4
    assert bounds["load"] == pytest.approx(1 / 3)


def test_pieces_bound_by_different_units_add_up():
    """Two loops: the MXU needs 4 cycles for each of the 6 x 8 products of both, VALU 0.75 in one and 8 in the other."""
    p = Program()
    p.loop(3, 8, 6, VALU=3)
    p.loop(4, 8, 6, VALU=32)
    schedule = parse(*p.texts())
    work = step(schedule).variants[0]
    bounds = compiled_cost.unit_bounds(work, schedule.capacity, positions=48)
    assert (bounds["MXU"], bounds["VALU"]) == (4 + 4, 0.75 + 8)
    pieces = compiled_cost.pieces(work, schedule.capacity, positions=48)
    assert [(piece["unit"], piece["bound"]) for piece in pieces if piece["bound"]] == [("MXU", 4), ("VALU", 8)]
    assert sum(piece["bundles"] for piece in pieces) == pytest.approx(work["bundles"] / 48)


@pytest.mark.parametrize(
    ("kernel", "width", "lanes", "bound"),
    [
        # 12 heads of 64: the network's layers at D = 32 and 8, and two products of attention.
        ("forward", 32, 128, (32 + 32 + 24) / 512),
        ("forward", 8, 128, (24 + 12 + 24) / 512),
        ("forward", 32, 256, (32 + 32 + 24) / 1024),
        ("splash", None, 128, 24 / 512),
        # Five products of attention, the layers forth and back, and the gradients of the weights.
        ("backward", 32, 128, (60 + 128 + 24 + 12) / 512),
    ],
)
def test_arithmetic_bound(kernel, width, lanes, bound):
    assert compiled_cost.arithmetic_bound(kernel, 12, 64, width, lanes) == pytest.approx(bound)


def test_figures_of_a_kernel():
    schedule = parse(*attention(16).texts())
    tile = {"block_q": 32, "block_k": 128, "group": 4}
    made = {"tiles": {"dape_attention_forward": tile, "splash_mha_fwd": tile}, "notes": []}
    order = {"target": "v5e", "program": "dape", "model": "125M", "width": 32, "length": 1024, "backward": False}
    entry = compiled_cost.describe(order, made, "dape_attention_forward", schedule)
    assert entry["interior"] == 16 * 34 * 16 / 4 / (32 * 128)  # bound by the MXU
    assert entry["with_ends"] == pytest.approx(entry["interior"] + 17 / (32 * 128))
    assert (entry["largest_bound"], entry["ratio_to_largest_bound"]) == ("MXU", 1)
    assert entry["ratio_to_design_bound"] == entry["interior"] / (88 / 512)
    # One of 12 heads a step.
    splash = compiled_cost.describe({**order, "program": "splash"}, made, "splash_mha_fwd", schedule)
    assert splash["interior"] == 12 * entry["interior"]
    entries = [entry, splash, {**splash, "interior": 9.0, "with_ends": 9.0}, {**splash, "target": "v6e", "interior": 1}]
    compiled_cost.compare_to_splash(entries)
    assert entry["interior_to_splash"] == pytest.approx(1 / 12)
    assert np.isclose(entry["with_ends_to_splash"], entry["with_ends"] / splash["with_ends"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets=v5f"], "--targets=v5f: 'v5f' is unknown; did you mean"),
        (["--kernels=forward,sideways"], "'sideways' is unknown"),
        (["--models=125M,125M"], "--models=125M,125M names 125M twice"),
        (["--widths=8,0"], "--widths=8,0: 0 is too small"),
        (["--length=1000"], "--length=1000: a multiple of 1024 is needed"),
        (["--block_q=64"], "--block_k is missing"),
        (["--output=/proc/none/cost.json"], "--output=/proc/none/cost.json: cannot be written"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_wrong_flags_get_one_line(command, tmp_path, arguments, message):  # noqa: F811
    check_refusal(command("kernel_cost", f"--output={tmp_path / 'cost.json'}", *arguments), message)
    assert not list(tmp_path.iterdir())


def test_without_libtpu_it_says_what_to_install(command, tmp_path):  # noqa: F811
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    check_refusal(command("kernel_cost", f"--output={tmp_path / 'cost.json'}"), 'pip install "jax[tpu]"')


@pytest.mark.slow
def test_a_report(command, tmp_path):  # noqa: F811
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    arguments = ["--targets=v5e", "--kernels=forward,splash", "--widths=8", "--length=1024"]
    entries = []
    for block_q in (32, 64):
        path = tmp_path / "cost.json"
        done = command("kernel_cost", *arguments, f"--block_q={block_q}", "--block_k=256", f"--output={path}")
        assert done.returncode == 0, done.stderr
        report = json.loads(path.read_text())
        assert set(report["calibration"]) == {"v5e"}
        entries += [e for e in report["kernels"] if e["kernel"] == "forward"]
        assert {e["block_q"] for e in report["kernels"] if e["kernel"] == "splash"} == {512, 1024}
    small, large = entries
    assert (small["block_q"], large["block_q"], large["block_k"], large["variants"]) == (32, 64, 256, 2)
    # Twice the queries: twice the products, and what is not in the loop over groups costs less a position.
    assert large["interior_mxu_rows"] == 2 * small["interior_mxu_rows"]
    assert 0.7 * small["interior"] < large["interior"] < 1.05 * small["interior"]
    assert all(e["ratio_to_largest_bound"] >= 1 and not e["notes"] for e in entries)
