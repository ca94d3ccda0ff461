"""GGUF is written by llama.cpp's converter, of the merged model, with a Modelfile; or nothing is left."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.data.conftest import make_tokenizer
from tests.models.published import write_checkpoint
from tests.results.made import exported
from tests.results.models import CHATML, LLAMA, with_tokenizer, write_adapter, write_base
from tuner.errors import MachineError, TunerError
from tuner.results.gguf import SCRIPT, added_bos, converter, go_template

STAND_IN = """
import json, sys
from pathlib import Path

whole, _, weights, _, outtype = sys.argv[1:]
config = {name: json.loads((Path(whole) / f"{name}.json").read_text()) for name in ("config", "tokenizer_config")}
Path(weights).write_text(json.dumps({**config, "outtype": outtype, "called": Path(whole).name}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converter that writes what it was given."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / SCRIPT).write_text(STAND_IN)
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    return folder / SCRIPT


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return with_tokenizer(write_base(tmp_path / "base", LLAMA))


def test_an_adapter_goes_out_merged_with_a_modelfile(tmp_path: Path, base: Path, stand_in: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)

    done = exported(adapter, tmp_path / "Mine", "--as", "gguf", "--dtype", "fp16")

    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in (tmp_path / "Mine").iterdir()) == ["Mine.gguf", "Modelfile"]
    given = json.loads((tmp_path / "Mine" / "Mine.gguf").read_text())
    assert given["config"]["architectures"] == ["LlamaForCausalLM"]
    assert (given["outtype"], given["called"]) == ("f16", "Mine")
    assert given["tokenizer_config"]["add_bos_token"] is False  # chatml writes none
    assert (tmp_path / "Mine" / "Modelfile").read_text().startswith("FROM ./Mine.gguf\nTEMPLATE")
    assert " tokens: its logits equal those of the adapter" in done.output
    assert f"Next: ollama create mine -f {tmp_path / 'Mine' / 'Modelfile'}" in done.output


def test_internlm2_is_converted_as_llama(tmp_path: Path, stand_in: Path) -> None:
    write_checkpoint(tmp_path / "internlm2")
    with_tokenizer(tmp_path / "internlm2")

    done = exported(tmp_path / "internlm2", tmp_path / "mine", "--as", "gguf")

    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "mine" / "mine.gguf").read_text())["config"]["model_type"] == "llama"


def test_without_the_converter_one_message_says_how_to_get_it(tmp_path: Path, base: Path) -> None:
    with pytest.raises(MachineError, match=r"pip install 'tuner-deepspeed\[gguf\]'. Or clone .*export LLAMA_CPP="):
        converter({"PATH": str(tmp_path)})
    with pytest.raises(MachineError, match=f"LLAMA_CPP is {tmp_path}, and that folder has no {SCRIPT}"):
        converter({"LLAMA_CPP": str(tmp_path), "PATH": os.defpath})


def test_a_converter_on_the_path_is_found(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("")
    (tmp_path / SCRIPT).chmod(0o755)

    assert converter({"PATH": str(tmp_path)}) == (tmp_path / SCRIPT).resolve()


def test_an_installed_converter_is_found_and_a_clone_comes_before_it(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages" / SCRIPT
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.syspath_prepend(str(installed.parent))

    assert converter({"PATH": str(tmp_path / "empty")}) == installed
    assert converter(os.environ) == stand_in


def test_what_the_converter_refuses_is_told_and_nothing_is_left(tmp_path: Path, base: Path, stand_in: Path) -> None:
    stand_in.write_text("raise NotImplementedError('BPE pre-tokenizer was not recognized')")

    done = exported(base, tmp_path / "out" / "mine", "--as", "gguf")

    assert isinstance(done.exception, TunerError)
    assert "NotImplementedError: BPE pre-tokenizer was not recognized" in str(done.exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_destination_named_as_a_gguf_file_is_refused_with_the_command(tmp_path: Path, base: Path) -> None:
    for words in ((), ("--as", "gguf")):
        done = exported(base, tmp_path / "mine.gguf", *words)
        assert f"tuner export SOURCE {tmp_path / 'mine'} --as gguf" in str(done.exception)


def like_llama2(folder: Path) -> None:
    """Write a small model with a tokenizer of Llama 2's kind, which llama.cpp's converter knows."""
    tokens = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokens.train_from_iterator(["What is the capital of Denmark?", "It is Copenhagen."] * 20, trainer)
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, extra_special_tokens=["<|im_start|>", "<|im_end|>"], **marks
    )
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=1, eos_token_id=2, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_llama_cpps_own_converter_writes_what_its_own_reader_reads(tmp_path: Path) -> None:
    try:
        script = converter(os.environ)
    except MachineError as error:
        pytest.skip(str(error))
    like_llama2(tmp_path / "model")

    done = exported(tmp_path / "model", tmp_path / "mine", "--as", "gguf", "--dtype", "fp32")

    assert done.exit_code == 0, done.output
    sys.path.insert(0, str(script.parent / "gguf-py"))
    try:
        import gguf  # llama.cpp's own, beside its converter
    finally:
        sys.path.pop(0)
    reader = gguf.GGUFReader(tmp_path / "mine" / "mine.gguf")
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["llama.context_length"] == 512 and found["general.name"] == "Mine"
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert "im_start" in found["tokenizer.chat_template"]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()["model.embed_tokens.weight"]
    theirs = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    torch.testing.assert_close(torch.tensor(theirs.data), ours)


@pytest.mark.parametrize("adds", [True, False])
def test_whether_the_bos_token_is_added_is_read_back_from_the_file(tmp_path: Path, adds: bool) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    writer.add_add_bos_token(adds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    assert added_bos(tmp_path / "it.gguf") is adds


def test_the_first_turn_keeps_its_opening_where_llama_cpp_does_not_add_it() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.bos_token = "<|im_start|>"  # as SmolLM2's
    talk = [{"role": "user", "content": "Hi."}]

    kept, stripped = go_template(tokenizer, keeps_bos=True), go_template(tokenizer)

    assert kept and kept.render(talk).startswith("<|im_start|>user")
    assert not stripped or not stripped.render(talk).startswith("<|im_start|>")
