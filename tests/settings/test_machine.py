from pathlib import Path

import pytest

from distributed_training.settings import machine as machines

ROWS = """\
0, GPU-aaaa1111, NVIDIA H200, 143771, 9.0, 700.00
1, GPU-bbbb2222, NVIDIA A100-SXM4-80GB, 81920, 8.0, [N/A]
2, GPU-cccc3333, Tesla T4, 15360, 7.5, 70.00
"""
MIB = 2**20


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A stand-in whose answer and exit code a test may choose."""

    def install(answer=ROWS, code=0):
        (tmp_path / "answer").write_text(answer)
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n/bin/cat {tmp_path / 'answer'}\nexit {code}\n")
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_the_weakest_gpu_counts(nvidia_smi):
    nvidia_smi()
    machine = machines.detect_machine()
    assert (machine.num_gpus, machine.gpu_name) == (3, "NVIDIA H200")
    assert (machine.gpu_memory_bytes, machine.compute_capability) == (15360 * MIB, (7, 5))
    assert machine.power_w == 70


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (" 0 , 2 ", [143771, 15360]),
        ("GPU-cccc,0", [15360, 143771]),
        ("0,9,1", [143771]),  # as CUDA does: nothing from the first unknown one on
        ("", []),
        ("-1", []),
    ],
)
def test_hidden_gpus_do_not_count(visible, memories, nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = machines.detect_machine()
    assert machine.num_gpus == len(memories)
    assert machine.gpu_memory_bytes == min(memories, default=0) * MIB


def test_a_driver_without_gpus_is_a_machine_without(nvidia_smi):
    assert machines.detect_machine().num_gpus == 0, "no driver"
    for answer, code in (("", 0), ("NVIDIA-SMI has failed\n", 9)):
        nvidia_smi(answer, code)
        machine = machines.detect_machine()
        assert (machine.num_gpus, machine.gpu_name, machine.compute_capability) == (0, None, (0, 0))


def test_memory_is_this_machines():
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    assert 0 < machines.available_ram_bytes() <= total


def test_a_gpu_that_does_not_tell_its_memory(nvidia_smi, monkeypatch):
    """Integrated GPUs (GB10, Jetson) answer [N/A]: memory.total is the host's."""
    nvidia_smi("0, GPU-dddd4444, NVIDIA GB10, [N/A], 12.1\n")
    monkeypatch.setattr(machines, "available_ram_bytes", lambda: 99 * MIB)
    machine = machines.detect_machine()
    assert (machine.num_gpus, machine.compute_capability) == (1, (12, 1))
    assert machine.gpu_memory_bytes == machine.ram_bytes == 99 * MIB
