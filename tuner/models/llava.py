"""A LLaVA made of an LLM and a vision tower: a folder that transformers loads like a published model.

The weights are copied tensor by tensor, once on each node, so no rank holds a whole model and ZeRO-3 shards it as it
loads. `projectors` knows the layouts of projectors. Shapes: V rows of embeddings, H hidden_size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from transformers import AddedToken, LlavaConfig, LlavaForConditionalGeneration, TokenizersBackend

from tuner import paths, remote_code
from tuner.errors import ModelError
from tuner.files import JsonObject, copy, read_json_object, write_json
from tuner.models import compat, internlm, projectors
from tuner.models.made import made_once
from tuner.pretrained import explained, tensors_of
from tuner.progress import shown, tqdm_class
from tuner.recipes.schema import Model, Vision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FORMAT_VERSION = 1
IMAGE_TOKEN = "<image>"  # noqa: S105
PROJECTOR = "model.multi_modal_projector."
_FIX = "Set TUNER_CACHE to a writable folder with free space for a copy of the model."
_TOWER_KEY = "model.vision.path"
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.bin")
TOWER, _LLM = "model.vision_tower.", "model.language_model."
MODEL_TYPE = "llava_llama"
"""Of LLaVA's own code."""
TOWER_OF_LLAVA = "model.vision_tower.vision_tower."
"""What the names of a trained tower begin with in a checkpoint of LLaVA's own code."""
_SHARD_BYTES = 4 * 2**30
_ROWS = 64
"""Added rows of embeddings make their number a multiple of this, which matrix units of GPUs are fast with."""


def is_joined(path: str) -> bool:
    """Return whether the model in a folder reads images already."""
    folder = paths.local(path)
    return folder is not None and isinstance(read_json_object(folder / "config.json").get("vision_config"), dict)


def materialize(model: Model, path: str, cache: Path, *, weights: bool) -> Path:
    """Return the folder of the LLaVA below `cache`, made unless it is there already.

    Args:
        path: The LLM: a folder, or an id on the hub.
        weights: Make the weights too; False: only the config and the processor.

    Raises:
        ModelError: the LLM, the tower or the projector does not fit, or is incomplete.
        DiskError: `cache` cannot be written.
    """
    assert model.vision is not None
    vision, options = model.vision, {"weights": weights, "trusts_pickles": model.trust_remote_code}
    llm = _fetched(path, model.revision, "model.path", **options)
    tower = _fetched(vision.path, vision.revision, _TOWER_KEY, **options)
    projector = projectors.file_of(vision.projector) if vision.projector else None
    kind = "llava" if weights else "llava-processor"
    folder = cache / f"{kind}-v{FORMAT_VERSION}-{_hash(vision, [llm, tower, *([projector] if projector else [])])}"

    def write(draft: Path) -> None:
        with shown(f"joining {path} and {vision.path}"):
            _write(draft, model, llm, tower, projector, weights=weights)

    return made_once(folder, write, _FIX)


def _fetched(path: str, revision: str | None, where: str, *, weights: bool, trusts_pickles: bool) -> Path:
    """Return the local folder of a model, downloaded if it is on the hub; of two formats of weights, safetensors.

    Raises:
        ModelError: it has weights as pickles alone, which the user does not trust.
    """
    local = paths.local(path)
    if local is not None:
        return local
    trusts_pickles = trusts_pickles or path in remote_code.PUBLISHED_PICKLES
    for pattern in (_WEIGHTS if trusts_pickles else _WEIGHTS[:1]) if weights else ("",):
        folder = Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=[*_SMALL, *filter(None, [pattern])],
                ignore_patterns=["*/*"],  # copies of the weights in other formats
                tqdm_class=tqdm_class(),
            )
        )
        if any(folder.glob(pattern or "*")):
            return folder
    if trusts_pickles:
        return folder
    raise remote_code.untrusted_pickles(path, where)


def _hash(vision: Vision, inputs: Sequence[Path]) -> str:
    digest = hashlib.sha256(vision.model_dump_json(exclude={"path", "revision", "projector"}).encode())
    for path in inputs:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                status = file.stat()
                digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _write(draft: Path, model: Model, llm: Path, tower: Path, projector: Path | None, *, weights: bool) -> None:
    assert model.vision is not None
    published = _published(llm)
    if projector is None and has_own_projector(llm):
        projector = llm
    text = _text_config(published)
    tower_config = _tower_config(tower)
    tokenizer = _tokenizer(llm)
    num_rows = text.vocab_size
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    if image_id >= num_rows:
        text.vocab_size = -(-(image_id + 1) // _ROWS) * _ROWS
    config = LlavaConfig(
        text_config=text,
        vision_config=tower_config,
        image_token_id=image_id,
        image_seq_length=(tower_config.image_size // tower_config.patch_size) ** 2,
        vision_feature_layer=model.vision.feature_layer,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    config.architectures = [LlavaForConditionalGeneration.__name__]
    config.dtype = published.dtype
    config.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    write_json(draft / "processor_config.json", _processor(config, tower, pads=model.vision.pad_to_square))
    if (llm / "generation_config.json").is_file():
        copy(llm / "generation_config.json", draft / "generation_config.json")
    if weights:
        _write_weights(draft, config, _pieces(config, published, model, llm, tower, projector))


def has_own_projector(llm: Path) -> bool:
    """Return whether a folder holds a model in the layout of LLaVA's own code."""
    return "mm_vision_tower" in read_json_object(llm / "config.json")


def _published(llm: Path) -> PreTrainedConfig:
    if has_own_projector(llm):
        config = read_json_object(llm / "config.json")
        return transformers.LlamaConfig.from_dict(
            {key: value for key, value in config.items() if not key.startswith(("mm_", "model_type"))}
        )
    with explained(str(llm)):
        return transformers.AutoConfig.from_pretrained(llm, trust_remote_code=False)


def _text_config(published: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the LLM, in a class that transformers has.

    Raises:
        ModelError: transformers has no such class.
    """
    if type(published).__module__ == internlm.__name__:
        return internlm.as_llama(published)
    if not type(published).__module__.startswith("transformers."):
        message = f"transformers has no class for model_type {published.model_type!r}, so no tower can be joined to it"
        raise ModelError(message, where="model.path", fix="Use another LLM.")
    return type(published).from_dict(published.to_dict())


def _tower_config(tower: Path) -> PreTrainedConfig:
    """Return the config of the vision half of a CLIP model.

    Raises:
        ModelError: the folder holds no CLIP model.
    """
    with explained(str(tower), _TOWER_KEY):
        config = transformers.AutoConfig.from_pretrained(tower, trust_remote_code=False)
    vision_config = getattr(config, "vision_config", config)
    if vision_config.model_type != "clip_vision_model":
        message = (
            f"the tower in {str(tower)!r} is of model_type {config.model_type!r}; a LLaVA reads images with a CLIP"
        )
        raise ModelError(message, where=_TOWER_KEY, fix="Use a CLIP model, such as openai/clip-vit-large-patch14-336.")
    return vision_config


def _tokenizer(llm: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the LLM with the token of an image, in a class that transformers has."""
    with explained(str(llm)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(llm, trust_remote_code=False)
    if type(tokenizer).__module__ == internlm.__name__:
        tokenizer = TokenizersBackend(
            tokenizer_object=tokenizer.backend_tokenizer,
            chat_template=tokenizer.chat_template,
            model_max_length=tokenizer.model_max_length,
            **tokenizer.special_tokens_map,
        )
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
    return tokenizer


def _processor(config: LlavaConfig, tower: Path, *, pads: bool) -> JsonObject:
    with explained(str(tower), _TOWER_KEY):
        images = transformers.AutoImageProcessor.from_pretrained(tower, trust_remote_code=False).to_dict()
    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "image_processor": {**images, "image_processor_type": "LlavaImageProcessor", "do_pad": pads},
    }


# Weights


def _pieces(
    config: LlavaConfig, published: PreTrainedConfig, model: Model, llm: Path, tower: Path, projector: Path | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in the LLaVA and the value of each weight."""
    has_tower, trusts_pickles = False, model.trust_remote_code
    for name, weight in _stored(llm, "model.path", trusts_pickles=trusts_pickles):
        if name.startswith(TOWER_OF_LLAVA):
            has_tower = True
            yield f"{TOWER}{name.removeprefix(TOWER_OF_LLAVA).removeprefix('vision_model.')}", weight
            continue
        if projectors.name_of(name):
            continue
        for llama_name, value in internlm.llama_weights(name, weight, published).items():
            yield (
                llama_name if llama_name.startswith("lm_head.") else f"{_LLM}{llama_name.removeprefix('model.')}",
                value,
            )
    is_whole = None
    for name, weight in () if has_tower else _stored(tower, _TOWER_KEY, trusts_pickles=trusts_pickles):
        # Beside its vision half, a CLIP has one that reads texts, and what joins both.
        is_whole = name.startswith(("vision_model.", "text_model.", "logit_scale")) or is_whole
        if not is_whole or name.startswith("vision_model."):
            yield f"{TOWER}{name.removeprefix('vision_model.')}", weight
    assert model.vision is not None
    weights = projectors.read_projector(projector, trusts_pickles=trusts_pickles) if projector else None
    weights = weights or _new_projector(config, model.vision.seed)
    yield from ((f"{PROJECTOR}{name}", weight) for name, weight in weights.items())


def _new_projector(config: LlavaConfig, seed: int) -> dict[str, Tensor]:
    sizes = (config.vision_config.hidden_size, config.text_config.hidden_size, config.text_config.hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = (torch.nn.Linear(*pair) for pair in pairwise(sizes))
    layers = {"linear_1": first, "linear_2": second}
    return {f"{name}.{key}": weight for name, layer in layers.items() for key, weight in layer.state_dict().items()}


def _stored(folder: Path, where: str, *, trusts_pickles: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a folder, one at a time.

    Raises:
        ModelError: there are no weights, or pickles that the user does not trust.
    """
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with tensors_of(file, where) as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                yield name, stored.get_tensor(name)
    if files:
        return
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        message = f"{str(folder)!r} holds no weights"
        raise ModelError(message, where=where, fix="Copy the model again with all its files.")
    for file in files:
        yield from projectors.pickled(file, where, trusts=trusts_pickles)


def _write_weights(folder: Path, config: LlavaConfig, pieces: Iterator[tuple[str, Tensor]]) -> None:
    """Write weights in shards with their index, and check that they are those of a model with this config.

    Raises:
        ModelError: a weight is missing, has no place in the model, or has another shape.
    """
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    lacking = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del lacking["lm_head.weight"]
    shard: dict[str, Tensor] = {}
    files, unplaced, num_bytes = dict[str, str](), list[str](), 0

    def flush() -> None:
        file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        with compat.os_errors():
            save_file({name: weight.contiguous() for name, weight in shard.items()}, folder / file, {"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weight in pieces:
        if name not in lacking:
            unplaced.append(name)
            continue
        fitted = _fitted(name, weight, lacking.pop(name))
        if shard and sum(tensor.nbytes for tensor in shard.values()) + fitted.nbytes > _SHARD_BYTES:
            flush()
        shard[name] = fitted
        num_bytes += fitted.nbytes
    flush()
    lost = [name for name in unplaced if name.endswith((".weight", ".bias")) and name != "lm_head.weight"]
    if lacking or lost:
        first = f"lacks {min(lacking)}" if lacking else f"has no place for {lost[0]}"
        message = f"the LLM, the tower and the projector do not make a LLaVA, which {first}"
        raise ModelError(message, where="model.vision", fix="Copy both models again, or use another LLM.")
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _fitted(name: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the weight with added rows of embeddings, which are the mean of the others.

    Raises:
        ModelError: it has another shape.
    """
    stored_shape = tuple(weight.shape)
    if (
        stored_shape != shape
        and stored_shape[1:] == shape[1:]
        and stored_shape[0] < shape[0]
        and name.endswith(_OF_TOKENS)
    ):
        mean_1H = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean_1H.expand(shape[0] - stored_shape[0], -1)])
    if stored_shape != shape:
        where = "model.vision.projector" if name.startswith(PROJECTOR) else "model.vision"
        message = f"{name} has the shape {list(stored_shape)}, and the model of these two needs {list(shape)}"
        raise ModelError(message, where=where, fix="Use a projector that was trained with this LLM and this tower.")
    return weight


_OF_TOKENS = ("embed_tokens.weight", "lm_head.weight")
