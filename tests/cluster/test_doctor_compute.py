"""What the doctor says of how workers compute, from what they report."""

import pytest

from baton.cluster.doctor import doctor
from baton.cluster.doctor.doctor import compute_data, format_compute
from baton.proto import admin_pb2, worker_pb2

pytestmark = pytest.mark.fast


def worker(name, *, alive=True, numerics="default", **compute):
    inventory = worker_pb2.Inventory(compute=worker_pb2.Compute(**compute)) if compute else worker_pb2.Inventory()
    state = worker_pb2.WorkerState(worker_id=name, role="decode", dtype="bfloat16", numerics=numerics)
    state.inventory.CopyFrom(inventory)
    return admin_pb2.WorkerStatus(state=state, alive=alive)


def reply(*workers):
    return admin_pb2.StatusReply(workers=workers)


GPU = "NVIDIA H200"


def test_what_is_as_it_should_be_is_no_finding():
    status = reply(
        worker("d0", form="triton", quantization="fp8", device=GPU, untuned=["gemm_fp8 1x2"]),
        worker("d1", form="reference", why="device cpu", quantization="none", device="cpu"),
        worker("d2", form="ordered", quantization="none", device=GPU, numerics="invariant"),
        worker("d3", alive=False, form="reference", why="heads of 48", device=GPU),
        worker("old"),
    )
    assert doctor.check_compute(status) == []
    assert [item["worker"] for item in compute_data(status)] == ["d0", "d1", "d2"]


@pytest.mark.parametrize(("form", "numerics"), [("reference", "default"), ("invariant", "invariant")])
def test_a_gpu_without_its_kernels_is_told(form, numerics):
    why = "no kernel is made for heads of 48"
    status = reply(worker("d0", form=form, why=why, device=GPU, numerics=numerics))
    [found] = doctor.check_compute(status)
    assert (found.name, found.level) == ("kernels of d0", "warn")
    assert "heads of 48" in found.detail
    assert found.next


def test_output_that_was_not_finite_is_told():
    status = reply(worker("d0", form="triton", device=GPU), worker("d1", form="triton", device=GPU))
    status.workers[1].state.inventory.num_not_finite = 2
    [found] = doctor.check_compute(status)
    assert (found.name, found.level) == ("output of d1", "warn")
    assert "NaN or an infinity 2 times" in found.detail


def test_gemms_that_the_library_refused_are_told():
    shapes = ["1x2", "3x4", "5x6", "7x8"]
    status = reply(worker("d0", form="triton", device=GPU, num_library_refused=9, library_refused=shapes))
    [found] = doctor.check_compute(status)
    assert found.level == "warn"
    assert "refused 9 float8 GEMMs" in found.detail
    assert "1x2, 3x4, 5x6 and 1 more" in found.detail


def test_kernels_that_were_compiled_while_serving_are_told():
    status = reply(
        worker("d0", form="triton", device=GPU, num_kernels_serving=3, late_kernels=["a_kernel", "b_kernel"])
    )
    [found] = doctor.check_compute(status)
    assert (found.name, found.level) == ("kernels of d0", "warn")
    assert "3 compiled while streams waited: a_kernel, b_kernel" in found.detail
    assert compute_data(status)[0]["late_kernels"] == ["a_kernel", "b_kernel"]
    assert "3 kernels compiled late (a_kernel, b_kernel)" in format_compute(compute_data(status))


def test_the_table_has_a_line_for_each_worker_and_all_that_fell_back():
    status = reply(
        worker("d0", form="triton", quantization="fp8", device=GPU, num_library_refused=2, library_refused=["1x2"],
               untuned=["a 1", "b 2"]),
        worker("d1", form="reference", why="device cpu", quantization="none", device="cpu"),
    )  # fmt: skip
    status.workers[0].state.inventory.graphs.failed["verify 4 x 3"] = "no memory"
    data = compute_data(status)
    assert data[0]["num_graphs_failed"] == 1
    assert data[0]["untuned"] == ["a 1", "b 2"]
    lines = format_compute(data).splitlines()
    assert "2 GEMMs refused (1x2); 1 graphs failed; 2 shapes untuned (a 1, b 2)" in lines[1]
    assert "torch reference" in lines[2]
    assert "device cpu" in lines[2]
    assert format_compute([]) == "no live worker says how it computes"
