"""The README is short, links to what is there and shows the mission's commands; the Chinese one says the same.

`tests/test_docs.py` runs its commands.
"""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
CHINESE = README.with_name("README_zh-CN.md")
MISSION = (
    "tuner train internlm2_chat_7b_qlora_oasst1_e3 --deepspeed deepspeed_zero2",
    "NPROC_PER_NODE=8 tuner train internlm2_chat_7b_qlora_oasst1_e3 --deepspeed deepspeed_zero3",
    "srun ... tuner train internlm2_chat_7b_qlora_oasst1_e3 --launcher slurm --deepspeed ./my_ds.json",
)


def code_lines(page: Path) -> list[str]:
    """Return the indented lines of a page, without the comments after them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line[4:].split("  #")[0].rstrip() for line in lines if line.startswith("    ")]


def blocks(page: Path) -> list[str]:
    """Return the headings, paragraphs, list items, table rows and pieces of code of a page."""
    return re.split(r"\n\n|\n(?=\||- )", page.read_text(encoding="utf-8"))


def facts(block: str) -> list[str]:
    """Return what no translation changes: names in backquotes, links to files, figures; their order may."""
    same_links = block.replace(CHINESE.name, README.name)
    return sorted(re.findall(r"`[^`]+`|\]\([^)]+\)|\d+(?:\.\d+)*", same_links))


def test_the_readme_is_short_and_shows_the_missions_commands() -> None:
    written = re.sub(r"<!-- generated.*?<!-- end -->", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)

    assert len(written.split()) <= 930
    assert set(MISSION) <= set(code_lines(README))


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8"))

    assert len(links) > 30
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_both_readmes_show_the_same_commands_and_code_in_the_same_order() -> None:
    assert code_lines(CHINESE) == code_lines(README)


def test_both_readmes_name_the_same_files_tests_and_figures_block_by_block() -> None:
    assert [facts(block) for block in blocks(CHINESE)] == [facts(block) for block in blocks(README)]


def test_both_readmes_have_the_same_sections_and_all_text_of_the_chinese_one_is_chinese() -> None:
    english, chinese = ([block for block in blocks(page) if block.startswith("## ")] for page in (README, CHINESE))
    text = [block for block in blocks(CHINESE) if not block.startswith(("#", "    ", "|---", "| ---", "<!--"))]

    assert len(chinese) == len(english) > 1
    assert [block for block in text if not re.search("[\u4e00-\u9fff]", block)] == []
