"""What `evsys_jax.inspection` found as lines of text and as plain values for JSON.

Lines are ASCII but for what an id contains, no value is ever cut, and no layout depends on a
terminal's width but for the line breaks between tokens. Without `colors` a line holds no
escape sequence; control characters of foreign ids are written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from evsys_jax.calltree import ShownCall
from evsys_jax.inspection import BETWEEN, PROMPT, RolloutPicture, RolloutSummary, Span

BAR = 24
"""Characters of the longest span's bar."""

_BOLD, _DIM, _RED, _GREEN, _YELLOW = "1", "2", "31", "32", "33"
_HEADINGS = (
    "rollout group verdict calls chains prompt between sampled captured trained reward advantage"
    " reason"
).split()
_TEXT_COLUMNS = ("rollout", "verdict", "reason")
_STATES = {True: "frozen", False: "open, calls may still come", None: "not readable"}
_MARKS = {PROMPT: ".", BETWEEN: "-"}


def list_lines(summaries: Sequence[RolloutSummary], *, colors: bool = False) -> Iterator[str]:
    """Write one line per rollout, below a heading.

    Args:
      summaries: the rollouts.
      colors: with ANSI colours: masked rollouts are yellow.

    Yields:
      Lines of columns, separated by two blanks or more. An absent value is `-`; a record
      without a usable id is `#` and its number.
    """
    rows = [_cells(each) for each in summaries]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    yield _paint(_align(_HEADINGS, widths), _BOLD, colors)
    for each, row in zip(summaries, rows, strict=True):
        yield _paint(_align(row, widths), "" if each.trains else _YELLOW, colors)


def summary_values(summary: RolloutSummary) -> dict[str, Any]:
    """Return a rollout's numbers as plain values, by the names of `RolloutSummary`."""
    return asdict(summary)


def picture_lines(
    picture: RolloutPicture, *, tokens: bool = False, colors: bool = False, width: int | None = None
) -> Iterator[str]:
    """Write what became of one rollout, its calls as a tree, and its chain span by span.

    Args:
      picture: the rollout.
      tokens: write every token id; a sampled one as `id:logprob`.
      colors: with ANSI colours: green trains, yellow was sampled and doesn't train.
      width: where to break lines of tokens; None keeps a span on one line.

    Yields:
      Lines.
    """
    yield from _head_lines(picture, colors)
    yield ""
    yield from _call_lines(picture, colors)
    yield ""
    yield from _chain_lines(picture, colors)
    if tokens and picture.spans:
        yield ""
        yield from _token_lines(picture, colors, width)


def picture_values(picture: RolloutPicture, *, tokens: bool = False) -> dict[str, Any]:
    """Return one rollout as plain values.

    Args:
      picture: the rollout.
      tokens: also every token of each span, with mask and logprobs.

    Returns:
      The fields of `RolloutPicture`, those of its summary first and on the same level; an
      advantage is not among them.
    """
    values = summary_values(picture.summary)
    del values["advantage"]
    spans = []
    for span in picture.spans:
        spans.append(asdict(span))
        if tokens:
            part = slice(span.start, span.start + span.length)
            spans[-1]["tokens"] = picture.tokens[part].tolist()
            spans[-1]["mask"] = picture.mask[part].tolist()
            spans[-1]["logprobs"] = picture.logprobs[part].tolist()
    return {
        **values,
        "source": "captures" if picture.captured else "record",
        "frozen": picture.frozen,
        "incomplete": picture.incomplete,
        "lost": list(picture.lost),
        "terminal": {**asdict(picture.attribution), "chain": picture.terminal_chain},
        "call_tree": [asdict(call) for call in picture.calls],
        "spans": spans,
    }


def _cells(each: RolloutSummary) -> list[str]:
    return [
        each.rollout_id or f"#{each.record}",
        _optional(each.group),
        "trains" if each.trains else "masked",
        str(each.calls),
        str(each.chains),
        str(each.prompt),
        str(each.between),
        str(each.sampled),
        str(each.captured),
        str(each.trained),
        _optional(each.reward),
        _optional(each.advantage, digits=6),
        each.reason or "-",
    ]


def _optional(value: float | None, digits: int = 10) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.ljust(width) if heading in _TEXT_COLUMNS else cell.rjust(width)
        for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True)
    )
    return "  ".join(aligned).rstrip()


def _head_lines(picture: RolloutPicture, colors: bool) -> Iterator[str]:
    each = picture.summary
    verdict = "trains" if each.trains else f"masked: {each.reason}"
    # What it says of the attribution is said below.
    detail = each.detail.replace(picture.attribution.reason, "").strip(", ")
    detail = detail.replace(", , ", ", ")
    if detail:
        verdict += f" ({_printable(detail)})"
    group = "in none" if each.group is None else f"{each.group}, trajectory {each.trajectory}"
    task = "" if each.task is None else f", task {each.task}"
    yield f"rollout   {_paint(each.rollout_id, _BOLD, colors)}"
    yield f"group     {group}{task}, record {each.record}"
    yield f"verdict   {_paint(verdict, _GREEN if each.trains else _YELLOW, colors)}"
    yield f"reward    {_optional(each.reward)}"
    yield (
        f"tokens    prompt {each.prompt}, between turns {each.between}, sampled {each.sampled};"
        f" captured {each.captured}, trained {each.trained}"
    )
    if not picture.captured:
        yield "source    the record carries its tokens"
        return
    state = _STATES[picture.frozen]
    if picture.incomplete:
        state += ", " + _paint("incomplete", _RED, colors)
    if picture.lost:
        state += ": lost " + ", ".join(map(_printable, picture.lost))
    yield f"source    captured calls, {state}"
    yield f"terminal  {_describe_terminal(picture)}"


def _describe_terminal(picture: RolloutPicture) -> str:
    found = picture.attribution
    reason = f" ({_printable(found.reason)})" if found.reason else ""
    if found.model_call_id is None:
        return f"none{reason}"
    chain = f"; its chain: {picture.terminal_chain}" if picture.terminal_chain else ""
    return f"{_printable(found.model_call_id)}, by {found.method}{reason}{chain}"


def _call_lines(picture: RolloutPicture, colors: bool) -> Iterator[str]:
    yield _paint(f"calls     {len(picture.calls)}", _BOLD, colors)
    names = [_name(call) for call in picture.calls]
    width = max(map(len, names), default=0)
    prompts = max((len(str(call.prompt_length)) for call in picture.calls), default=0)
    generated = max((len(str(call.generated)) for call in picture.calls), default=0)
    before: str | None = None
    for call, name in zip(picture.calls, names, strict=True):
        words = ", ".join(_remarks(call, before))
        line = (
            f"{name.ljust(width)}  prompt {call.prompt_length:{prompts}}"
            f"  sampled {call.generated:{generated}}  {words}"
        )
        yield _paint(line.rstrip(), _call_color(call), colors)
        before = call.call_id


def _name(call: ShownCall) -> str:
    """Return a call's mark, its place in the tree, and its id."""
    lead = "  " * (call.depth - 1) + ("+ " if call.branches else "| ") if call.depth else ""
    return f"{'*' if call.on_chain else ' '} {lead}{_printable(call.call_id)}"


def _remarks(call: ShownCall, before: str | None) -> Iterator[str]:
    if call.parent_id is None:
        if not call.note:
            yield "no parent" if call.broken or call.claimed_parent_id else "root"
    elif call.parent_id != before:
        yield f"after {_printable(call.parent_id)}"
    if call.claimed_parent_id not in (None, call.parent_id):
        yield f"claims {_printable(str(call.claimed_parent_id))}"
    if call.note:
        yield call.note
    if call.retry:
        yield f"retry, {call.retry}" if call.retry != "unresolved" else "unresolved retry"
    if call.empty:
        yield "empty"
    if call.contested:
        yield "contested"
    if call.broken:
        yield "broken delta"
    if call.terminal:
        yield "scored"
    if call.chain:
        yield f"ends {call.chain}"


def _call_color(call: ShownCall) -> str:
    if call.contested or call.broken or call.retry == "unresolved":
        return _RED
    if call.note and not call.note.endswith("_recovered"):
        return _RED
    return "" if call.on_chain else _DIM


def _chain_lines(picture: RolloutPicture, colors: bool) -> Iterator[str]:
    yield _paint(f"chain     {len(picture.tokens)} tokens", _BOLD, colors)
    names = [_printable(span.call) for span in picture.spans]
    width = max(map(len, names), default=0)
    digits = len(str(len(picture.tokens)))
    longest = max((span.length for span in picture.spans), default=0)
    for span, name in zip(picture.spans, names, strict=True):
        bar = _MARKS.get(span.kind, "#") * -(-BAR * span.length // max(longest, 1))
        line = f"  {span.start:{digits}}  {span.kind:<7}  {span.length:{digits}}"
        painted = _paint(bar, _span_color(picture, span), colors)
        yield f"{line}  {name.ljust(width)}  {painted}".rstrip()


def _span_color(picture: RolloutPicture, span: Span) -> str:
    if span.kind in _MARKS:
        return _DIM
    return _GREEN if picture.summary.trains else _YELLOW


def _token_lines(picture: RolloutPicture, colors: bool, width: int | None) -> Iterator[str]:
    for span in picture.spans:
        part = slice(span.start, span.start + span.length)
        ids = picture.tokens[part].tolist()
        sampled = span.kind not in _MARKS
        if sampled:
            scores = picture.logprobs[part].tolist()
            words = [f"{token}:{score:.4f}" for token, score in zip(ids, scores, strict=True)]
        else:
            words = [str(token) for token in ids]
        mask = picture.mask[part].tolist()
        shades = [_DIM if not sampled else _GREEN if live else _YELLOW for live in mask]
        title = f"{span.kind} {span.length}" + (f", {_printable(span.call)}" if span.call else "")
        yield _paint(title, _BOLD, colors)
        for line in _break(list(zip(words, shades, strict=True)), width):
            runs = [(shade, [word for word, _ in run]) for shade, run in groupby(line, _shade_of)]
            yield "  " + " ".join(_paint(" ".join(run), shade, colors) for shade, run in runs)


def _shade_of(word: tuple[str, str]) -> str:
    return word[1]


def _break(words: list[tuple[str, str]], width: int | None) -> Iterable[list[tuple[str, str]]]:
    """Break a run of words into lines that fit, two columns being taken."""
    line: list[tuple[str, str]] = []
    used = 2
    for word in words:
        if line and width is not None and used + len(word[0]) > width:
            yield line
            line, used = [], 2
        line.append(word)
        used += len(word[0]) + 1
    if line:
        yield line


def _printable(text: str) -> str:
    """Write out control characters, which could move the cursor or end the line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _paint(text: str, color: str, colors: bool) -> str:
    return f"\x1b[{color}m{text}\x1b[0m" if colors and color and text else text
