"""The heavy checks of `tuner doctor`: each tries one library in a process of its own, with a deadline.

The parent starts and ends the children and reads their answers. A child is `python -m tuner.lab.probes NAME`: a crash
or a hang in it does not end the doctor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import IO, Any

from tuner.files import JsonObject
from tuner.worker.quiet import quiet_libraries

DEADLINE_S = 60.0
_AT_ONCE = 2


@dataclass(frozen=True)
class Row:
    """One line of the report. `status`: 'ok', 'warning', 'failed', or 'absent' for an optional part."""

    name: str
    status: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Probe:
    """One check: its name in the report, the arguments of its process, and what to do if it fails."""

    name: str
    arguments: Sequence[str]
    fix: str
    module: str = "tuner.lab.probes"


def run_all(probes: Sequence[Probe], env: Mapping[str, str], deadline_s: float) -> list[Row]:
    """Run the probes, a few at a time, each for at most `deadline_s` seconds; return rows in their order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda probe: run(probe, env, deadline_s), probes))


def run(probe: Probe, env: Mapping[str, str], deadline_s: float) -> Row:
    """Run one probe until it ends, crashes or reaches the deadline; end its process in any case."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # an unread pipe would fill
        argv = [sys.executable, "-m", probe.module, *probe.arguments]
        child = subprocess.Popen(argv, stdout=out, stderr=err, env=dict(env), start_new_session=True)
        try:
            code = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        how = _end(code, text_in(err), deadline_s)
        answer = last_object(out, "status", "text") or {"status": "failed", "text": how}
    status, text = str(answer["status"]), str(answer["text"])
    return Row(probe.name, status, text, probe.fix if status == "failed" else None)


def _end(code: int | None, stderr: str, deadline_s: float) -> str:
    """Return how a process ended, for one without an answer."""
    if code is None:
        return f"no answer within {deadline_s:g} s"
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with code {code} and no output"


def text_in(stream: IO[bytes]) -> str:
    """Return what a process has written to a temporary file."""
    stream.seek(0)
    return stream.read().decode(errors="replace")


def last_object(stream: IO[bytes], *keys: str) -> JsonObject:
    """Return the last line of a temporary file that is an object of JSON with these keys; {} if none is."""
    for line in reversed(text_in(stream).splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.keys() >= {*keys}:
                return answer
    return {}


def heavy(num_gpus: int, *, has_flash: bool, has_varlen: bool) -> list[Probe]:
    """Return the probes for a machine with `num_gpus` visible GPUs, and with flash attention of a package or torch."""
    again = "Reinstall it for this machine: make install, or pip install --force-reinstall "
    network = "NCCL_DEBUG=INFO shows what it tried; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME help most often."
    local = "Check that this machine's host name resolves, or set a network interface: GLOO_SOCKET_IFNAME=lo."
    return [
        Probe("torch", ["torch"], f"{again}torch."),
        Probe("training libraries", ["trainers"], f"{again}-r requirements.txt."),
        Probe("DeepSpeed", ["deepspeed"], f"{again}deepspeed."),
        Probe("bitsandbytes", ["bitsandbytes"], f"{again}bitsandbytes; only quantized recipes need it."),
        *([Probe("flash attention", ["flash-attention"], f"{again}flash-attn.")] if has_flash and num_gpus else []),
        *([Probe("attention by lengths", ["varlen"], f"{again}torch.")] if has_varlen else []),
        Probe("all-reduce", ["all-reduce", str(num_gpus or 2)], network if num_gpus else local),
    ]


Answer = tuple[str, str]
"""'ok', 'warning' or 'failed', and the result as text."""

_NF4_ERROR = 0.15
"""Limit of the relative error of a 4-bit round trip: 0.09 for nf4 on normal numbers, in bitsandbytes 0.50.2."""
_BF16_ERROR = 0.02
"""Limit of a relative error in bf16: 0.004 is a rounding, and a token too many or too few is off by 0.1 and more."""
_OPS = ("cpu_adam", "fused_adam", "async_io")


def torch_computes() -> Answer:
    """Multiply two matrices on every visible GPU, or on the CPU."""
    import torch

    kind, count = _device(), torch.accelerator.device_count()
    wrong = []
    for device in [f"{kind}:{index}" for index in range(count)] or ["cpu"]:
        ones = torch.ones(256, 256, device=device)
        if (ones @ ones).sum().item() != 256**3:
            wrong.append(device)
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    builds = (f"built for {name} {number}" for name, number in versions.items() if number)
    built = next(builds, kind if count else "a CPU build")
    where = f"on {count} GPU{'s' * (count > 1)}" if count else "on the CPU"
    if wrong:
        return "failed", f"torch {torch.__version__} computes wrong numbers on {', '.join(wrong)}"
    return "ok", f"torch {torch.__version__}, {built}, computes {where}"


def _device() -> str:
    """Return torch's name for the accelerator of this machine, or 'cpu'."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def trainers_import() -> Answer:
    """Import everything that a rank imports."""
    import_module("tuner.worker.train")
    names = ("transformers", "trl", "peft", "accelerate", "datasets")
    return "ok", f"{', '.join(f'{name} {version(name)}' for name in names)}: all import"


def deepspeed_ops() -> Answer:
    """Import DeepSpeed and report which of its ops are compiled or can be compiled."""
    import deepspeed
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    compiled = [name for name in _OPS if installed_ops.get(name)]
    possible = [name for name in _OPS if compatible_ops.get(name) and name not in compiled]
    neither = [name for name in _OPS if name not in (*compiled, *possible)]
    groups = (("compiled", compiled), ("compiled at first use", possible), ("not possible here", neither))
    ops = "; ".join(f"{title}: {', '.join(names)}" for title, names in groups if names)
    return "ok", f"deepspeed {deepspeed.__version__}; {ops}"


def four_bits() -> Answer:
    """Quantize numbers to 4 bits and back, on the first GPU or the CPU."""
    import torch
    from bitsandbytes import functional

    device = _device()
    numbers = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    stored, state = functional.quantize_4bit(numbers, quant_type="nf4")
    error = float((functional.dequantize_4bit(stored, state) - numbers).norm() / numbers.norm())
    status, name = "ok" if error < _NF4_ERROR else "failed", "the CPU" if device == "cpu" else device
    return status, f"bitsandbytes {version('bitsandbytes')}: 4-bit quantization works on {name} (error {error:.3f})"


def flash_attention() -> Answer:
    """Compare flash attention with torch's own on the first GPU."""
    import torch
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    query, key, value = torch.randn(3, 1, 64, 2, 64, device="cuda", dtype=torch.float16).unbind(0)
    swapped = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True).transpose(1, 2)
    apart = float((flash_attn_func(query, key, value, causal=True) - expected).abs().max())
    return "ok" if apart < 0.01 else "failed", f"flash_attn {version('flash_attn')}, {apart:.4f} from torch's attention"


def varlen() -> Answer:
    """Compare torch's flash attention of two packed samples on the first GPU with SDPA of each of them on the CPU."""
    import torch

    from tuner.models import attention

    torch.manual_seed(0)
    lengths: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 33, 100], dtype=torch.int32), "max_length_q": 67}
    apart, heads = 0.0, (4, 2, 2)  # of queries, keys and values
    for window in (None, 16):
        states = [torch.randn(1, count, 100, 64, requires_grad=True) for count in heads]
        answers = []
        for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
            placed = [rows.detach().to(device, dtype).requires_grad_() for rows in states]
            options = lengths | {"cu_seq_lens_q": lengths["cu_seq_lens_q"].to(device), "sliding_window": window}
            query, key, value = placed
            attended, _ = attention.attend(torch.nn.Module(), query, key, value, None, **options)
            attended.square().sum().backward()
            answers.append([attended, *(rows.grad for rows in placed)])
        pairs = zip(*answers, strict=True)
        apart = max(apart, *(float((on_gpu.cpu().float() - on_cpu).norm() / on_cpu.norm()) for on_cpu, on_gpu in pairs))
    status = "ok" if apart < _BF16_ERROR else "failed"
    return status, f"torch {torch.__version__} computes packed samples, {apart:.4f} from each of them alone"


def all_reduce(ranks: str) -> Answer:
    """Run an all-reduce over `ranks` processes of this machine, with NCCL on NVIDIA GPUs and gloo on a CPU."""
    import torch

    backend = torch.distributed.get_default_backend_for_device(_device())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_add, (int(ranks), backend, f"file://{folder}/store"), int(ranks))
    return "ok", f"{backend} all-reduce over {ranks} processes works"


def _add(rank: int, ranks: int, backend: str, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    kind = _device()
    device = "cpu" if kind == "cpu" else f"{kind}:{rank}"
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    number = torch.full((1024,), rank + 1.0, device=device)
    dist.all_reduce(number)
    total, expected = float(number[0]), ranks * (ranks + 1) / 2
    dist.destroy_process_group()
    if total != expected:
        raise RuntimeError(f"{backend} all-reduce over {ranks} processes gives {total:g}, not {expected:g}")


PROBES: dict[str, Callable[..., Answer]] = {
    "torch": torch_computes,
    "trainers": trainers_import,
    "deepspeed": deepspeed_ops,
    "bitsandbytes": four_bits,
    "flash-attention": flash_attention,
    "varlen": varlen,
    "all-reduce": all_reduce,
}


def main() -> None:
    quiet_libraries()
    status, text = PROBES[sys.argv[1]](*sys.argv[2:])
    print("\n" + json.dumps({"status": status, "text": text}), flush=True)


if __name__ == "__main__":
    main()
