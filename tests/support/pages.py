"""What is wrong with the language and the form of a page of the documentation.

A page is Markdown. Prose is what remains without code, tables, comments and addresses. Its sentences are
short, and it uses the field's words (the table "The words" of the design) in place of private ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LONGEST, OF_CELLS = 25, 40
"""Words of a sentence: of a page, and of one that is made, whose cells are prose."""
GUIDE_LINES = 120
WORDS: Mapping[str, str] = {
    r"told|heard": "request, response, message, reported",
    r"trunks?|crews?|ledgers?": "parent, worker pool, write-ahead log",
    r"promised|pace of a": "objective",
    r"entit(?:y|ies)|lending": "tenant, work-conserving",
    r"swelling|pieces wanted": "size delta, demand",
    r"strangers?": "third-party, foreign",
    r"absent device": "fake device",
    r"in_turn|arms": "interleaved runs, variants",
    r"nobody|somebody": "the noun",
    r"of late": "recently",
}
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.M | re.S)


def prose(text: str) -> str:
    """``text`` without code, tables, comments, directives and addresses; a code span is the word ``code``."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.S)
    text = re.sub(r"^(?:\||:::|    |> \[!).*$", "", text, flags=re.M)
    text = re.sub(r"``[^`]+``|`[^`]+`", "code", text)
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of ``text``: of its paragraphs, list items and headings."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.)\s)|(?<=:)\n", prose(text)):
        words = " ".join(block.split()).lstrip("-*# ")
        yield from (sentence for sentence in re.split(r"(?<=[.!?:;])(?:\*\*)?\s+", words) if sentence)


def problems(text: str, lines: int | None = None, longest: int = LONGEST) -> list[str]:
    """What is wrong with the page ``text``, a sentence each. ``lines``: how many it may have; ``longest``:
    how many words a sentence may have."""
    faults = []
    count = len(text.splitlines())
    if lines is not None and count > lines:
        faults.append(f"the page has {count} lines, {lines} are accepted")
    for sentence in sentences(text):
        words = sentence.split()
        if len(words) > longest:
            faults.append(f"a sentence has {len(words)} words, {longest} are accepted: {sentence}")
        if re.match(r"Who(?:ever)? (?!.*\?$)", sentence):
            faults.append(f"a sentence begins with {words[0]} in place of a noun: {sentence}")
        for pattern, instead in WORDS.items():
            if word := re.search(rf"\b(?:{pattern})\b", sentence, re.I):
                faults.append(f"{word[0]!r} is a private word, say {instead}: {sentence}")
    return faults


def examples(text: str, *kinds: str) -> Iterator[str]:
    """The code blocks of ``text`` whose language is one of ``kinds``; "" is a block without one."""
    for block in FENCE.finditer(text):
        first, *lines = block[0].splitlines()
        if first.strip(" `").split(" ")[0] in kinds:
            yield "\n".join(line.removeprefix(block[1]) for line in lines[:-1])


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after ``program`` of each line that calls it in a block of shell."""
    for block in examples(text, "", "bash", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(rf"(?:sudo |\$ )?{program} (.*)", line):
                yield shlex.split(match[1], comments=True)


def wrong_words(words: list[str], command: Any) -> list[str]:
    """The words of a command line that are no command of a group, or no option of the command. What follows
    a script or ``--`` is the script's own."""
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [rest[0]]
        command = command.commands[rest.pop(0)]
    options = {
        name: parameter
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    wrong, value = [], False
    for word in rest:
        name, equals, _ = word.partition("=")
        if value:
            value = False
        elif word in ("--", "|", "-m") or word.endswith(".py"):
            break
        elif name in options:
            value = not (equals or options[name].is_flag)
        elif word.startswith("--") and word != "--help":
            wrong.append(word)
    return wrong


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    slugs: dict[str, int] = {}
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
        slugs[slug] = slugs.get(slug, -1) + 1
    return {
        slug if place == 0 else f"{slug}_{place}" for slug, most in slugs.items() for place in range(most + 1)
    }


def broken_links(page: Path, pages: Mapping[Path, str]) -> list[str]:
    """Links of ``page`` to files that are not there, or to anchors that their page lacks. ``pages``: the text
    of every page by its resolved path, generated ones too."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", pages[page])):
        target, _, anchor = unquote(link).partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (page.parent / target).resolve() if target else page
        if path not in pages and not path.exists():
            broken.append(f"{link} leads to no file")
        elif anchor and path in pages and anchor not in anchors(pages[path]):
            broken.append(f"{link} leads to no heading")
    return broken
