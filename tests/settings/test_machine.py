import os
from types import SimpleNamespace

import psutil
import pytest

from distributed_training.settings import detect
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import GPUS, find_gpu, parse_gpu

ROWS = """\
0, GPU-aaaa1111, NVIDIA H200, 143771, 9.0, 700.00
1, GPU-bbbb2222, NVIDIA A100-SXM4-80GB, 81920, 8.0, [N/A]
2, GPU-cccc3333, Tesla T4, 15360, 7.5, 70.00
"""
MIB = 2**20


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that installs a fake nvidia-smi with the given output and exit code."""

    def install(answer=ROWS, code=0):
        (tmp_path / "answer").write_text(answer)
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n/bin/cat {tmp_path / 'answer'}\nexit {code}\n")
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


@pytest.mark.processes
def test_a_machine_has_the_values_of_its_weakest_gpu(nvidia_smi):
    nvidia_smi()
    machine = detect.detect_machine()
    assert (machine.num_gpus, machine.gpu_name) == (3, "NVIDIA H200")
    assert (machine.gpu_memory_bytes, machine.compute_capability) == (15360 * MIB, (7, 5))
    assert machine.power_w == 70


@pytest.mark.processes
@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (" 0 , 2 ", [143771, 15360]),
        ("GPU-cccc,0", [15360, 143771]),
        ("0,9,1", [143771]),  # CUDA ignores all entries from the first unknown one
        ("", []),
        ("-1", []),
    ],
)
def test_hidden_gpus_do_not_count(visible, memories, nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect.detect_machine()
    assert machine.num_gpus == len(memories)
    assert machine.gpu_memory_bytes == min(memories, default=0) * MIB


@pytest.mark.processes
def test_a_driver_without_gpus_means_no_gpus(nvidia_smi):
    assert detect.detect_machine().num_gpus == 0, "no driver"
    for answer, code in (("", 0), ("NVIDIA-SMI has failed\n", 9)):
        nvidia_smi(answer, code)
        machine = detect.detect_machine()
        assert (machine.num_gpus, machine.gpu_name, machine.compute_capability) == (0, None, (0, 0))


@pytest.mark.processes
def test_a_gpu_that_does_not_report_its_memory(nvidia_smi, monkeypatch):
    """Integrated GPUs (GB10, Jetson) report [N/A] because they share the host's memory."""
    nvidia_smi("0, GPU-dddd4444, NVIDIA GB10, [N/A], 12.1, [N/A]\n")
    monkeypatch.setattr(detect, "available_ram_bytes", lambda: 99 * MIB)
    machine = detect.detect_machine()
    assert (machine.num_gpus, machine.compute_capability) == (1, (12, 1))
    assert machine.gpu_memory_bytes == machine.ram_bytes == 99 * MIB


@pytest.mark.parametrize(
    ("groups", "files", "ram", "cpus"),
    [
        # In cgroup version 2, a parent group of this process may have the limit of a job.
        (
            "0::/job/step",
            {
                "job/memory.max": "1000", "job/memory.current": "700",
                "job/memory.stat": "active_file 100\ninactive_file 50\nanon 550",
                "job/step/memory.max": "max", "job/step/memory.current": "700",
                "job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000",
            },
            450, 2,
        ),
        # A container sees the host's path but finds its limits at the root.
        (
            "0::/docker/abc",
            {
                "memory.max": "1000", "memory.current": "900",
                "memory.stat": "active_file 20\ninactive_file 30",
                "cpu.max": "50000 100000",
            },
            150, 1,
        ),
        # memory.stat is missing, and version 1 is ignored
        (
            "5:memory:/x\n0::/",
            {
                "memory.max": "1000", "memory.current": "900", "cpu.max": "300000 100000",
                "x/memory.max": "10", "x/memory.current": "9",
            },
            100, 3,
        ),
        ("", {}, 10**6, 8),
    ],
)  # fmt: skip
def test_limits_of_a_container_are_respected(groups, files, ram, cpus, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    own = tmp_path / "own"
    own.write_text(groups)
    monkeypatch.setattr(detect, "_CGROUPS", tmp_path)
    monkeypatch.setattr(detect, "_OWN_CGROUPS", own)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert detect.available_ram_bytes() == ram
    assert detect.available_cpus() == cpus
    assert detect.threads_per_process(2) == max(1, cpus // 2)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("rtx4090", "RTX-4090"), ("RTX 4070", "RTX-4070"), ("4070TiSuper", "RTX-4070-Ti-Super"),
        ("4060 mobile", "RTX-4060-Laptop"), ("A6000", "RTX-A6000"), ("PRO 6000", "RTX-PRO-6000"),
        ("V100 16 GB", "V100-16GB"), ("DGX Spark", "GB10"), ("Tesla T4", "T4"),
        ("NVIDIA DGX Spark (GB10)", "GB10"), ("A100 SXM4 80GB", "A100-80GB"), ("3090s", "RTX-3090"),
        ("4090 laptop (16 GB)", "RTX-4090-Laptop"), ("H100PCIe", "H100-PCIe"), ("L40s", "L40S"),
    ],
)  # fmt: skip
def test_gpus_are_found_as_users_write_them(typed, name):
    assert parse_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("V100", "V100-32GB or V100-16GB"), ("3060 8GB", "Write RTX-3060"), ("M2", "needs CUDA"),
        ("RX7900XTX", "needs CUDA"), ("RTX-4075", "Did you mean RTX-4070"),
        ("H100 8", "known: 8. Write H100-80GB, 2xH100-80GB"), ("A6000 Ada", "known: ADA"),
        ("3090 + 1x 4090", "RTX-4090 and RTX-3090, but .* equal"), ("Mac Studio", "needs CUDA"),
        ("cpu", "omit --cluster"), ("colab a100", "A100-80GB or A100-40GB"),
    ],
)  # fmt: skip
def test_other_gpus_are_refused_in_one_line(typed, message):
    with pytest.raises(UserError, match=message):
        parse_gpu(typed)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16GB"), ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX-3060-Laptop"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti-16GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000-Max-Q"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce GTX 1080 Ti", None),
        ("NVIDIA A100X", None), ("NVIDIA H100 PCIe", "H100-PCIe"),
    ],
)  # fmt: skip
def test_devices_have_the_entry_of_their_form(device, name):
    gpu = find_gpu(device)
    assert (gpu and gpu.name) == name


def test_every_gpu_is_found_by_its_name_and_says_where_its_values_come_from():
    for gpu in GPUS.values():
        assert parse_gpu(gpu.name) == gpu
        assert gpu.source
