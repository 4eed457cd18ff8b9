"""Plans executed between real processes, over gloo."""

from collections.abc import Callable


def test_every_element_arrives(torchrun: Callable[..., str]) -> None:
    """Four processes, six pairs of layouts, buckets smaller than a row up to larger than everything, three times each:
    every target element equals the HF element it stands for, padding is zero, and no packet exceeds the bucket."""
    output = torchrun(4, "tests/weights/transport_program.py", timeout=240)
    assert sorted(output.splitlines()) == [f"rank {rank}: 6 cases" for rank in range(4)]
