"""Recipe files that are small and unfold: refused, or read, within a second of CPU and in 100 MB; nothing is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tuner import assets
from tuner.recipes.recipe_file import MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_TEXT

TINY = "tiny_full_sample_e1"
MANY = 5_000
FILES: dict[str, str] = {
    # What is refused.
    "loop": "_base_ = './loop.py'\n",
    "loop of two": "_base_ = './other of two.py'\n",
    "other of two": "_base_ = './loop of two.py'\n",
    "chain 0": f"_base_ = '{TINY}'\n",
    **{f"chain {number}": f"_base_ = './chain {number - 1}.py'\n" for number in range(1, 12)},
    "itself twice": "_base_ = ['./itself twice.py', './itself twice.py']\n",
    "wide": f"_base_ = {['./wide.py'] * MANY}\n",
    "wide at the end": f"_base_ = {['./leaf.py'] * MANY}\n",
    "leaf": "",
    "names": f"_base_ = {[TINY] * 2_000}\n",
    "a base outside": "_base_ = '../../../../../../etc/passwd'\n",
    "a device": "_base_ = '/dev/zero'\n",
    "a folder": "_base_ = '/'\n",
    "keys": f"_base_ = '{TINY}'\nmodel = dict({', '.join(f'k{number}=1' for number in range(MANY))})\n",
    "tops": "".join(f"k{number} = 1\n" for number in range(4_000)),
    "a mixture of nobody": f"train_dataloader = dict(dataset=dict(mixture={[{'part': 'x'}] * 3_000}))\n",
    "overlong texts": f"_base_ = '{TINY}'\nmodel = dict(path='{'y' * 15_000}', revision=1)\n",
    "a JSON bomb": f"_base_ = '{TINY}'\ndeepspeed = {'dict(a=' * 20}{'dict(), b=' * 900}1{')' * 20}\n",
    "names in other letters": f"_base_ = '{TINY}'\nｍodel = dict(path=1)\nmоdel = dict()\n",
    "text that turns round": f"_base_ = '{TINY}'\nmodel = dict(path='\u202egpj.exe', revision=1)\n",
    "a second file": f"_base_ = ['{TINY}', './a second file.py\\n']\n",
}
READ: dict[str, str] = {
    "a link to a base": "_base_ = './link.py'\n",
    "a mixture of many": f"train_dataloader = dict(dataset=dict(mixture={[{'part': 'alpaca'}] * 2_000}))\n",
    "a long list": f"_base_ = 'tiny_lora_sample_e1'\nadapter = dict(target_modules={['q_proj'] * 6_000})\n",
}
BOMBS: dict[str, str] = {
    "bytes": "x = 1\n" * (MAX_BYTES // 6 + 1),
    "one long text": f"x = '{'a' * (MAX_TEXT + 1)}'",
    "one long key": f"x = {{'{'a' * (MAX_TEXT + 1)}': 1}}",
    "many values": f"x = [{'1,' * (MAX_NODES + 1)}]",
    "many lines": "".join(f"x{index}=1\n" for index in range(8_000)) + f"y = [{'1,' * 2_001}]",
    "lists": "x = " + "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
    "dicts": "x = " + "dict(a=" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
    "lists at 60 KB": "x = " + "[" * 30_000 + "]" * 30_000,
    "parentheses at 60 KB": "x = " + "(" * 30_000 + "1" + ")" * 30_000,
    "minus at 60 KB": "x = " + "-" * 60_000 + "1",
    "not at 60 KB": "x = " + "not " * 15_000 + "1",
    "plus at 60 KB": "x = " + "+".join("1" * 30_000),
    "attributes": "x = a" + ".b" * 400,
    "attributes at 60 KB": "x = a" + ".b" * 29_000,
    "attributes as a key": "x = {a" + ".b" * 400 + ": 1}",
    "calls at 60 KB": "x = a" + "()" * 29_000,
    "subscripts at 60 KB": "x = a" + "[0]" * 19_000,
    "lambdas at 60 KB": "x = " + "lambda:" * 8_000 + "1",
    "elif at 60 KB": "if 1: pass\n" + "elif 1: pass\n" * 4_500,
    "digits": "x = " + "9" * 60_000,
    "hexadecimal digits": "x = 0x" + "f" * 60_000,
    "hexadecimal digits as a key": "x = {0x" + "f" * 60_000 + ": 1}",
    "hexadecimal digits in a call": "x = f(0x" + "f" * 60_000 + ")",
    "exponents": "x = 1e" + "9" * 60_000,
    "power": "x = 9 ** 9 ** 9 ** 9",
    "growing numbers": "a = 1e17\n" + "".join(f"a{n + 1} = a{n or ''} * a{n or ''}\n" for n in range(99)),
}
"""What the reader of one file refuses, in a short message."""
CHILD = """
import json, pathlib, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (600_000_000, 600_000_000))
from tuner.errors import TunerError
from tuner.recipes import loading
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    start = time.process_time()
    try:
        loading.load(str(path)).standalone()
        result = "read"
    except TunerError as error:
        result = str(error)
    found[path.stem] = (result, time.process_time() - start)
# Not ru_maxrss: it counts what the parent held before this program was loaded.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([found, int(peak.split()[1]) * 1024]))
"""


def test_a_file_that_unfolds_is_read_or_refused_in_seconds_and_in_little_memory(tmp_path: Path) -> None:
    for name, text in {**FILES, **READ, **BOMBS}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "link.py").symlink_to(tmp_path / "chain 0.py")
    (tmp_path / "circle.py").symlink_to(tmp_path / "circle.py")
    before = sorted(tmp_path.iterdir())

    argv, env = [sys.executable, "-c", CHILD, tmp_path], {**os.environ, "PYTHONPATH": str(assets.PACKAGE.parent)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, rss_bytes = json.loads(done.stdout)

    told = {name: result for name, (result, _) in found.items()}
    good = {*READ, "leaf", "link", "chain 0", *(f"chain {number}" for number in range(1, 9))}
    assert {name for name, result in told.items() if result == "read"} == good
    assert all(result.startswith("bad-recipe: ") for name, result in told.items() if name not in good)
    assert max(map(len, told.values())) < 13_000
    assert max(len(told[name]) for name in BOMBS) < 500
    # 0.3 s at most on an idle machine; what unfolds takes minutes.
    assert {name: seconds for name, (_, seconds) in found.items() if seconds > 10} == {}
    assert rss_bytes < 100_000_000
    assert sorted(tmp_path.iterdir()) == before
