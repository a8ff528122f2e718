"""The PTX machine counts the registers that setmaxnreg moves between the warps of a block."""

import pytest
import torch
from small_kernels import kernel

from ptxmachine import PtxFault, load

# With one block of 384 threads per multiprocessor, each thread has 168 of the 65,536 registers, so
# the block has 64,512 registers.
ALONE = ".maxntid 384, 1, 1\n.minnctapersm 1"
# The first 128 threads release registers, and the other threads take them.
GROUPS = """
    setp.lt.u32 %p1, %r0, 128;
    @%p1 bra FIRST;
    setmaxnreg.inc.sync.aligned.u32 {taken};
    bra.uni JOIN;
FIRST:
    setmaxnreg.dec.sync.aligned.u32 {given};
JOIN:
    bar.sync 0;
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.u32 [%d1], 1;
"""
SEEDS = range(4)


def launch(body, threads=384, bounds=ALONE, **options):
    x = torch.zeros(threads, dtype=torch.int32)
    load(kernel(body, bounds=bounds)).launch("k", (1,), (threads,), [x], **options)
    return x


def fault(body, **options):
    with pytest.raises(PtxFault) as caught:
        launch(body, **options)
    return caught.value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("given", "taken"), [(56, 224), (40, 232), (24, 240), (168, 168)])
def test_groups_take_what_the_first_gives(given, taken, seed):
    assert launch(GROUPS.format(given=given, taken=taken), seed=seed).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("given", "taken"), [(48, 232), (64, 224), (24, 248)])
def test_a_block_hangs_that_takes_more_registers_than_it_owns(given, taken, seed):
    found = fault(GROUPS.format(given=given, taken=taken), seed=seed)
    assert (found.kind, found.block) == ("deadlock", 0)
    assert found.warp >= 4
    assert "setmaxnreg.inc" in str(found)


def test_the_fault_says_what_is_missing():
    """The fault must name the registers that a warp waits for and the registers that are free.

    Four warps release 3,840 registers each, and seven of the other eight take 2,048 each.
    """
    found = fault(GROUPS.format(given=48, taken=232))
    assert "a warp waits for 2048 registers, and the block has 1024 that no warp owns" in str(found)


def test_a_warp_that_ends_gives_no_registers():
    body = GROUPS.format(given=48, taken=232).replace("    bar.sync 0;\n", "")
    assert fault(body).kind == "registers"


@pytest.mark.parametrize(
    ("bounds", "taken", "hangs"),
    [
        (".reqntid 384\n.minnctapersm 1", 232, False),
        (".maxntid 384, 1, 1\n.minnctapersm 1\n.maxnreg 160", 232, True),
        (".maxnreg 168", 232, False),
        (".maxnreg 168", 240, True),
        # With two blocks of 384 threads, each thread has 80 registers.
        (".maxntid 384, 1, 1\n.minnctapersm 2", 96, False),
        (".maxntid 384, 1, 1\n.minnctapersm 2", 104, True),
    ],
)
def test_the_bounds_of_the_kernel_set_the_registers_at_the_start(bounds, taken, hangs):
    body = GROUPS.format(given=40, taken=taken)
    if hangs:
        assert fault(body, bounds=bounds).kind == "deadlock"
    else:
        assert launch(body, bounds=bounds).all()


@pytest.mark.parametrize("taken", [120, 232])
def test_a_thread_starts_with_the_largest_count_where_the_bounds_leave_more(taken):
    """A thread starts with the count of setmaxnreg.inc if the directives allow more registers.

    Here the directives allow 256 registers for each of 256 threads.
    """
    body = GROUPS.format(given=40, taken=taken)
    assert launch(body, threads=256, bounds=".maxntid 256\n.minnctapersm 1").all()


@pytest.mark.parametrize("action", ["inc", "dec"])
@pytest.mark.parametrize("count", [0, 16, 100, 264])
def test_a_count_that_is_not_allowed(action, count):
    found = fault(f"    setmaxnreg.{action}.sync.aligned.u32 {count};")
    assert found.kind == "out of bounds"
    message = f"{count} registers of a thread, allowed: multiples of 8 from 24 to 256"
    assert message in str(found)


def test_registers_move_in_the_direction_of_the_instruction():
    body = "    setmaxnreg.inc.sync.aligned.u32 168;\n    setmaxnreg.dec.sync.aligned.u32 40;\n"
    body += "    setmaxnreg.{wrong};"
    found = fault(body.format(wrong="inc.sync.aligned.u32 32"))
    assert found.kind == "out of bounds"
    assert "setmaxnreg.inc sets 32 registers of a thread that has 40" in str(found)
    found = fault(body.format(wrong="dec.sync.aligned.u32 48"))
    assert "setmaxnreg.dec sets 48 registers of a thread that has 40" in str(found)


def test_registers_that_a_group_has_given_can_be_taken_again():
    body = "    setmaxnreg.dec.sync.aligned.u32 24;\n    bar.sync 0;\n"
    body += "    setmaxnreg.inc.sync.aligned.u32 168;\n    mad.wide.u32 %d1, %r0, 4, %d0;\n"
    assert launch(body + "    st.global.u32 [%d1], 1;").all()


def test_a_part_of_a_warp_may_not_move_registers():
    body = "    setp.lt.u32 %p1, %r0, 7;\n    @%p1 setmaxnreg.dec.sync.aligned.u32 40;"
    assert fault(body).kind == "divergence"


def test_a_block_with_more_threads_than_the_bounds_is_refused():
    with pytest.raises(ValueError, match=r"block: got \(416, 1, 1\), .* at most 384 threads"):
        launch("", threads=416)
