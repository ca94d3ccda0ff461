"""An export in fewer bits says what these cost, and is loaded again before it counts; others are refused."""

from __future__ import annotations

import copy
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig

from tests.data.conftest import conversation, make_tokenizer
from tests.results.made import exported
from tests.results.models import CHATML, GPT2, LLAMA, MIXTURE, SMALL, TOKENS, write_adapter, write_base
from tests.results.test_gguf import stand_in as stand_in
from tuner.cli import tuner
from tuner.errors import DataError, MachineError, ModelError, TunerError, UsageError
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.results import gguf_quants, quantized
from tuner.results.loaded_model import encoder_of, spec_of
from tuner.runs import checkpoints

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}

ODD = LlamaConfig(hidden_size=32, intermediate_size=50, **SMALL)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer(CHATML)
    config = LlamaConfig(**SIZES, vocab_size=-(-len(tokenizer) // 16) * 16, bos_token_id=0, eos_token_id=1)
    folder = write_base(tmp_path / "base", config, torch.bfloat16)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation("Why?", answer)) + "\n" for answer in ("one two", "three")))
    return path


# torchao


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_weights_by_torchao_are_smaller_and_load_in_plain_transformers(
    kind: str, base: Path, rows: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="an extra: pip install 'tuner-deepspeed[quantize]'")
    out = tmp_path / "out"

    done = exported(write_adapter(tmp_path / "adapter", base), out, "--quant", kind.upper(), "--data", rows, "--json")

    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["quantized"]
    before, after = told["perplexity"]["before"], told["perplexity"]["after"]
    assert told["kind"] == kind and before > 1 and after == pytest.approx(before, rel=0.2) and after != before
    assert 0 < told["logits_apart"] < 1
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    layer = model.model.layers[0].mlp.up_proj.weight
    assert kind == {"Float8Tensor": "fp8", "NVFP4Tensor": "nvfp4"}[type(layer.data).__name__]
    assert type(model.lm_head.weight.data) is torch.Tensor
    ids = AutoTokenizer.from_pretrained(out).apply_chat_template(
        conversation("Why?")["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    assert checkpoints.inspect(out) is None
    facts = checkpoints.facts(out)
    assert facts.quantized == told and facts.num_tensors == len(facts.tensors or {})
    assert f"{before:.4g}" in (out / "README.md").read_text() and (out / "generation_config.json").is_file()
    with torch.inference_mode():
        assert torch.isfinite(model(TOKENS).logits).all()


def test_what_is_written_is_evaluated_and_not_quantized_again(base: Path, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra: pip install 'tuner-deepspeed[quantize]'")
    out = tmp_path / "out"
    told = json.loads(exported(base, out, "--quant", "nvfp4", "--data", rows, "--json").stdout)["quantized"]

    measured = CliRunner().invoke(tuner, ["eval", str(out), "--data", str(rows), "--json"])
    again = exported(out, tmp_path / "again", "--quant", "fp8")

    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["metrics"]["perplexity"] == pytest.approx(told["perplexity"]["after"], rel=1e-3)
    assert isinstance(again.exception, ModelError) and str(out) in str(again.exception.where)


def test_without_rows_the_logits_alone_are_compared(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra: pip install 'tuner-deepspeed[quantize]'")

    told = json.loads(exported(base, tmp_path / "out", "--quant", "fp8", "--json").stdout)["quantized"]

    assert told["perplexity"] is None and told["logits_apart"] > 0


def test_a_run_that_was_moved_without_its_rows_is_exported_unmeasured(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    spec, wanted = spec_of(str(base), None), Overrides(data=str(rows), val=str(rows))
    recipe = load("tiny_full_custom_e1", wanted).config
    rows.rename(tmp_path / "moved.jsonl")

    assert quantized._rows(spec, encoder_of(spec), recipe, None) is None
    with pytest.raises(DataError):
        quantized._rows(spec, encoder_of(spec), recipe, str(rows))


def write_whole(folder: Path, config: PreTrainedConfig) -> Path:
    tokenizer = make_tokenizer(CHATML)
    config.vocab_size = -(-len(tokenizer) // 16) * 16
    tokenizer.save_pretrained(write_base(folder, config, torch.bfloat16))
    return folder


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [(MIXTURE, "fp8", "weights"), (GPT2, "fp8", "weights"), (LLAMA, "int4", "q_proj"), (ODD, "nvfp4", "down_proj")],
)
def test_layers_that_torchao_would_leave_as_they_are_are_refused(
    config: PreTrainedConfig, kind: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "check", lambda kind: None)
    base = write_whole(tmp_path / "base", copy.deepcopy(config))

    done = exported(base, tmp_path / "out", "--quant", kind)

    assert isinstance(done.exception, UsageError) and told in str(done.exception), done.output
    assert not (tmp_path / "out").exists()


def test_all_files_of_a_tokenizer_go_out_with_fewer_bits(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra: pip install 'tuner-deepspeed[quantize]'")
    named = make_tokenizer(CHATML)
    named.chat_template = {"default": CHATML, "tool_use": f"{CHATML}."}
    named.save_pretrained(base)

    assert exported(base, tmp_path / "out", "--quant", "fp8").exit_code == 0

    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == named.chat_template


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), TunerError("no numbers"), MemoryError()])
def test_an_interrupted_quantization_leaves_nothing(
    interruption: BaseException, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(whole: Path, dest: Path, *_: object) -> Any:
        assert (whole / "config.json").is_file()
        dest.mkdir()
        (dest / "model.safetensors").write_bytes(b"half")
        raise interruption

    monkeypatch.setattr(quantized, "check", lambda kind: None)
    monkeypatch.setattr(quantized, "quantize", torn)
    (tmp_path / "new").mkdir()

    done = exported(base, tmp_path / "new" / "out", "--quant", "fp8")

    assert done.exit_code != 0
    assert list((tmp_path / "new").iterdir()) == []


def test_torchao_that_is_not_installed_is_told_with_the_command(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)

    done = exported(base, tmp_path / "out", "--quant", "fp8")

    assert isinstance(done.exception, MachineError) and "[quantize]" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_int4_is_refused_without_a_gpu_that_packs_it(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="an extra: pip install 'tuner-deepspeed[quantize]'")

    done = exported(base, tmp_path / "out", "--quant", "int4")

    assert isinstance(done.exception, MachineError) and "nvfp4" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--quant", "q4_k_m"), "--quant"),
        (("--quant", "fp8", "--as", "gguf"), "--quant"),
        (("--quant", "fp9"), "--quant"),
        (("--quant", "q4_k_z", "--as", "gguf"), "--quant"),
        (("--quant", "fp8", "--as", "llama"), "--quant"),
        (("--data", "rows.jsonl"), "--data"),
        (("--quant", "q8_0", "--as", "gguf", "--data", "rows.jsonl"), "--data"),
    ],
)
def test_bits_that_a_layout_has_not_are_refused(
    options: tuple[str, ...], where: str, base: Path, tmp_path: Path
) -> None:
    done = exported(base, tmp_path / "out", *options)

    assert isinstance(done.exception, UsageError), done.output
    assert where in str(done.exception.where)
    assert not (tmp_path / "out").exists()


# GGUF


def program(folder: Path, text: str) -> Path:
    file = folder / "build" / "bin" / gguf_quants.PROGRAM
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_eight_bits_are_written_by_the_converter(base: Path, tmp_path: Path, stand_in: Path) -> None:
    assert exported(base, tmp_path / "out", "--as", "gguf", "--quant", "Q8_0").exit_code == 0

    assert json.loads((tmp_path / "out" / "out.gguf").read_text())["outtype"] == "q8_0"


def test_llama_quantize_writes_what_the_package_does_not(base: Path, tmp_path: Path, stand_in: Path) -> None:
    program(stand_in.parent, 'echo "$3 of $(cat "$1")" > "$2"')

    assert exported(base, tmp_path / "out", "--as", "gguf", "--quant", "q4_k_m").exit_code == 0

    text = (tmp_path / "out" / "out.gguf").read_text()
    assert text.startswith("Q4_K_M of {") and '"outtype": "auto"' in text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"out.gguf", "Modelfile"}


def test_what_llama_quantize_says_is_told_and_nothing_is_left(base: Path, tmp_path: Path, stand_in: Path) -> None:
    program(stand_in.parent, 'echo half > "$2"; echo "unsupported architecture" >&2; exit 1')

    done = exported(base, tmp_path / "new" / "out", "--as", "gguf", "--quant", "q4_k_m")

    assert isinstance(done.exception, TunerError) and "unsupported architecture" in str(done.exception)
    assert list((tmp_path / "new").iterdir()) == []


def test_kinds_of_llama_quantize_are_refused_where_it_is_not(base: Path, tmp_path: Path, stand_in: Path) -> None:
    done = exported(base, tmp_path / "out", "--as", "gguf", "--quant", "q4_k_m")

    assert isinstance(done.exception, MachineError)
    assert gguf_quants.PROGRAM in str(done.exception) and "q4_0" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_each_kind_is_made_by_what_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path)}

    by_none = [name for name in gguf_quants.NAMES if name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")]
    assert [gguf_quants.program(name, nowhere) for name in by_none] == [None] * 5
    found = program(tmp_path, "")
    assert gguf_quants.program("q8_0", {"LLAMA_CPP": str(tmp_path)}) is None
    assert gguf_quants.program("q4_0", {"LLAMA_CPP": str(tmp_path)}) == found.resolve()
    assert gguf_quants.program("q6_k", {"PATH": str(found.parent)}) == found.resolve()
    monkeypatch.setattr(gguf_quants.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError):
        gguf_quants.program("q4_0", nowhere)


@pytest.mark.parametrize("name", ["q5_1", "q5_0", "q4_1", "q4_0"])
def test_the_package_quantizes_matrices_and_keeps_the_rest(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(0)
    weights = {
        "token_embd.weight": torch.randn(10, 64, generator=generator).half(),
        "position_embd.weight": torch.randn(8, 64, generator=generator),
        "blk.0.ffn_up.weight": torch.randn(8, 64, generator=generator).half(),
        "blk.0.ffn_gate_inp.weight": torch.randn(4, 64, generator=generator),
        "blk.0.attn_norm.weight": torch.randn(64, generator=generator),
        "blk.0.odd.weight": torch.randn(4, 33, generator=generator).half(),
    }
    writer = gguf.GGUFWriter(tmp_path / "full.gguf", "llama")
    writer.add_name("Mine")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_token_list(["a", "ü"])
    for tensor, values in weights.items():
        writer.add_tensor(tensor, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    gguf_quants.quantize(tmp_path / "full.gguf", tmp_path / "small.gguf", name, None)

    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    contents = {key: field.contents() for key, field in reader.fields.items()}
    assert contents["general.name"] == "Mine" and contents["tokenizer.ggml.tokens"] == ["a", "ü"]
    assert contents["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
    assert contents["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    assert kinds == {
        "token_embd.weight": "q8_0",
        "position_embd.weight": "f32",
        "blk.0.ffn_up.weight": name,
        "blk.0.ffn_gate_inp.weight": "f32",
        "blk.0.attn_norm.weight": "f32",
        "blk.0.odd.weight": "f16",
    }
    for tensor in reader.tensors:
        values, exact = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)), weights[tensor.name].float()
        apart = float((values - exact).square().mean().sqrt())
        assert apart <= {"q8_0": 0.01, "f16": 0, "f32": 0}.get(kinds[tensor.name], 0.15)
    few, many = (
        sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(tmp_path / file).tensors)
        for file in ("small.gguf", "full.gguf")
    )
    assert few < many
