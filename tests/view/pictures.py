"""Takes a picture of each page of `reinforge view` in Chromium, wide and narrow, light and dark, and checks the page.

    make pictures                                             the runs of .reinforge/runs, to build/pictures
    python -m tests.view.pictures --runs FOLDER --out FOLDER --only run,episodes

A page fails if axe-core finds a problem that users of screen readers or of low contrast would have, if a script fails,
or if the page is wider than its window. The exit code is the number of such pages, at most 100.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urljoin

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from reinforge.view.learning_page import LearningSource
from reinforge.view.server import ViewServer

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
READ_LINKS = "all => all.map(each => each.getAttribute('href'))"
SETTLED_MS = 400
"""Time for the charts and the rows in view to be drawn."""


async def list_pages(page: Page, address: str, chosen: str) -> dict[str, str]:
    """Returns the addresses to look at by name: those that a run's own navigation has, and what they lead to."""
    await page.goto(address)
    found = {"runs": urljoin(address, "/"), "learning": urljoin(address, "/learning")}
    names = await page.eval_on_selector_all("#runs a[href^='/runs/']", READ_LINKS)
    runs = list(dict.fromkeys(name for name in names if name.count("/") == 2))
    if not runs:
        raise SystemExit("no run in this folder: make one, such as by `reinforge demo`")
    runs.sort(key=lambda run: run != f"/runs/{chosen}")
    if len(runs) > 1:
        query = "&".join(f"run={run.removeprefix('/runs/')}" for run in runs[:2])
        found["comparison"] = urljoin(address, f"/compare?{query}")
    if len(runs) > 2:
        query = "&".join(f"run={run.removeprefix('/runs/')}" for run in runs[:6])
        found["comparison of many"] = urljoin(address, f"/compare?{query}")
    found["run"] = urljoin(address, runs[0])
    await page.goto(found["run"])
    for link in await page.eval_on_selector_all("nav a", READ_LINKS):
        if link.startswith(f"{runs[0]}/"):
            found[link.rpartition("/")[2]] = urljoin(address, link)
    found["report"] = urljoin(address, f"{runs[0]}/report.html")
    await page.goto(urljoin(address, f"{runs[0]}/episodes?order=reward"))
    await page.wait_for_timeout(SETTLED_MS)
    links = await page.eval_on_selector_all("#rows tbody a", READ_LINKS)
    if links:
        found["episode"] = urljoin(address, links[0])
    return found


async def look(browser: Browser, name: str, address: str, folder: Path, axe: Axe, key: str) -> list[str]:
    """Takes the pictures of one page; returns its problems."""
    problems = []
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            context = await browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # type: ignore[arg-type]
                bypass_csp=True,  # axe-core is a script of the checker, not of the page
            )
            page = await context.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            await page.goto(key)
            await page.goto(address)
            await page.wait_for_timeout(SETTLED_MS)
            where = f"{name}, {size}, {scheme}"
            await page.screenshot(path=folder / f"{name.replace(' ', '-')}-{size}-{scheme}.png", full_page=True)
            over = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if over > 0:
                problems.append(f"{where}: {over} pixels wider than its window")
            found = await axe.run(page, options=RULES)
            for violation in found.response["violations"]:
                places = ", ".join(str(node["target"][0]) for node in violation["nodes"][:3])
                problems.append(f"{where}: {violation['id']} ({len(violation['nodes'])}): {places}")
            problems += [f"{where}: {error}" for error in errors]
            await context.close()
    return problems


async def run(args: argparse.Namespace) -> int:
    chromium = args.chromium or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("Chromium is not installed; name it with --chromium PATH")
    args.out.mkdir(parents=True, exist_ok=True)
    axe, failed = Axe(), 0
    source = LearningSource(args.runs.parent / "versions", args.runs.parent / "serve")
    async with ViewServer(args.runs, learning=source) as server, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = await list_pages(await browser.new_page(), server.address, args.run)
        for name, address in pages.items():
            if args.only and not re.fullmatch(args.only.replace(",", "|"), name):
                continue
            problems = await look(browser, name, address, args.out, axe, server.address)
            print(f"{name}: {'good' if not problems else ''}", *problems, sep="\n    " if problems else "", flush=True)
            failed += bool(problems)
        await browser.close()
    print(f"pictures in {args.out}")
    return min(failed, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path(".reinforge/runs"))
    parser.add_argument("--run", default="", help="the run whose pages are looked at; the newest one without it")
    parser.add_argument("--out", type=Path, default=Path("build/pictures"))
    parser.add_argument("--only", default="", help="names of pages, separated by commas")
    parser.add_argument("--chromium", default="")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
