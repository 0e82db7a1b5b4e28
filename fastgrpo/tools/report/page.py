"""The page of a report: one file, nothing loaded from elsewhere, no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark}.lead,th,td{overflow-wrap:anywhere}
body{font:15px/1.5 system-ui,sans-serif;color:#1f2430;background:#fff;margin:2rem auto;max-width:75rem;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}img{max-width:100%;height:auto}
table{border-collapse:collapse}th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid #e6e9ef;
vertical-align:top}td{font-variant-numeric:tabular-nums;min-width:9rem}th[scope=row]{font-weight:normal;color:#5b6470;white-space:pre}
.lead{font-size:1.1rem}.scroll{overflow-x:auto}footer{color:#5b6470;margin-top:2rem}
@media(prefers-color-scheme:dark){body{background:#14171d;color:#e8eaf0}th[scope=row],footer{color:#a3abb8}
th,td{border-color:#2b313c}img{background:#fff;border-radius:6px}}
"""


def render_page(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    sentences: Sequence[str],
    settings: Sequence[Sequence[str]],
    picture: bytes | None,
    version: str,
) -> str:
    """
    The page as HTML.

    Args:
        names: of the runs, the columns.
        rows: label and a cell a run.
        sentences: what there is to say before the table.
        settings: name and a cell a run, those that differ.
        picture: PNG; None = left out.
        version: of fastgrpo.
    """
    title = "fastgrpo report: " + ", ".join(names)
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="lead">{escape(sentence)}</p>' for sentence in sentences]
    parts.append(_table(names, rows))
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        words = "Reward, tokens, entropy, KL, seconds of a step and peak memory of " + ", ".join(names)
        parts.append(f'<h2>Step by step</h2><img alt="{escape(words)}" src="data:image/png;base64,{encoded}">')
    if settings:
        parts += ["<h2>Settings that differ</h2>", _table(names, settings)]
    parts.append(f"<footer>Written by fastgrpo {escape(version)}.</footer>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    ]
    return f'<div class="scroll"><table><tr><td></td>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"
