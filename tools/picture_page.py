"""Takes the picture of results/index.html that README.md shows, if the first view has changed.

    python tools/picture_page.py [CHROMIUM]

The picture has the hash of what it shows, so that a test finds an old one (tests/report/).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE, PICTURE = RESULTS / "index.html", RESULTS / "plots" / "page.png"
KEY = "sha256 of the first view"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
FLAGS += ("--hide-scrollbars", "--window-size=1280,900")


def hash_first_view(page: str) -> str:
    """The hash of a page up to the end of its first section, with the style of the whole."""
    first_view, end, _ = page.partition("</section>")
    return hashlib.sha256((first_view + end).encode()).hexdigest()


def read_hash(picture: Path) -> str | None:
    """The hash of the first view that a picture shows; None if it does not tell."""
    with Image.open(picture) as image:
        return image.info.get(KEY)


def main(browser: str) -> None:
    """Take the picture, unless the one that is there shows the page as it is."""
    shown = hash_first_view(PAGE.read_text(encoding="utf-8"))
    if PICTURE.exists() and read_hash(PICTURE) == shown:
        print(f"{PICTURE.name} shows the page as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / PICTURE.name
        command = [browser, *FLAGS, f"--screenshot={taken}", PAGE.as_uri()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(f"{PICTURE.name} shows an earlier page, and {browser} takes none: {error}")
        note = PngInfo()
        note.add_text(KEY, shown)
        with Image.open(taken) as image:
            image.convert("P", palette=Image.Palette.ADAPTIVE).save(PICTURE, pnginfo=note)
    print(f"took {PICTURE.name}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["chromium"])
