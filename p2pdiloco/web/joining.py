"""Ways to join a run, as the page shows them: a command, a link, and its QR."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from p2pdiloco.daemon.run_files.known_runs import PublishedRun, link_of
from p2pdiloco.errors import ConfigError
from p2pdiloco.web.view import MAX_SVG, JoinView


def join_view(run: PublishedRun, addresses: Sequence[str]) -> JoinView:
    """Make it of the addresses of whoever shows the page."""
    if not addresses:
        return JoinView()
    try:
        link = link_of(run, addresses)
    except ConfigError:  # addresses that no link can hold
        return JoinView(line=f"p2pdiloco node --join {addresses[0]} --run {run.id}")
    return JoinView(line=f"p2pdiloco node {link}", link=link, qr_svg=qr_svg(link))


@lru_cache(maxsize=64)
def qr_svg(text: str) -> str:
    """Draw a QR; empty: the text is too long for one, or the package is not installed."""
    try:
        import segno
    except ModuleNotFoundError:  # a bootstrap needs few packages
        return ""
    try:
        drawn = segno.make(text, error="l", micro=False).svg_inline(omitsize=True, border=2)
    except segno.DataOverflowError:
        return ""
    return drawn if len(drawn) <= MAX_SVG else ""
