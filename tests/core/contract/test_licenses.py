"""Everything that reinforge installs for a user has a license that a company can accept without asking."""

import re
from importlib import metadata
from importlib.resources import files

import pytest
from packaging.requirements import Requirement

PERMISSIVE = {
    "0BSD", "APACHE 2.0", "APACHE 2.0 LICENSE", "APACHE LICENSE 2.0", "APACHE LICENSE VERSION 2.0", "APACHE SOFTWARE",
    "APACHE-2.0", "BSD", "BSD-2-CLAUSE", "BSD-3-CLAUSE", "BSL-1.0", "CC0-1.0", "CNRI-PYTHON", "HPND", "ISC",
    "ISC LICENSE (ISCL)", "LLVM-EXCEPTION", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "PYTHON SOFTWARE FOUNDATION",
    "UNLICENSE", "ZLIB", "3-CLAUSE BSD",
}  # fmt: skip
FILE_COPYLEFT = {"tqdm": "MPL-2.0", "certifi": "Mozilla Public License 2.0 (MPL 2.0)"}
"""Packages with a license that covers changes of their own files only; they are used unchanged."""
FORBIDDEN = re.compile(r"\bA?GPL|LGPL|SSPL|CC-BY-NC|COMMONS CLAUSE", re.IGNORECASE)
CUDA = re.compile(r"^(nvidia|cuda|triton)")
"""Packages that come with a build of torch for GPUs, under NVIDIA's own terms; a CPU build has none of them."""


def read_licenses(name):
    """Returns the licenses of an installed package, by the newest form of its metadata that it fills in."""
    found = metadata.metadata(name)
    classifiers = [
        line.rsplit(" :: ", 1)[1] for line in found.get_all("Classifier", []) if line.startswith("License ::")
    ]
    named = [line for line in classifiers if line != "OSI Approved"]
    expressions = [found.get("License-Expression")] if found.get("License-Expression") else named
    if not expressions:
        expressions = [(found.get("License") or "").strip().partition("\n")[0]]
    return [part for each in expressions for part in re.split(r"\s+(?:AND|OR|WITH)\s+", each)]


def normalize(license):
    return re.sub(r"\s+license$", "", license.strip(), flags=re.IGNORECASE).upper()


def find_installed(root, extras):
    """Returns every package that a requirement brings in on this machine."""
    seen, queue = set(), [(root, frozenset(extras))]
    while queue:
        name, wanted = queue.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in wanted or {""}]
            if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
                queue.append((requirement.name.lower(), frozenset(requirement.extras)))
    return sorted({name for name, _ in seen} - {root})


def find_unacceptable(name, licenses):
    return [
        each
        for each in licenses
        if FORBIDDEN.search(each)
        or (normalize(each) not in PERMISSIVE and not (name in FILE_COPYLEFT and FILE_COPYLEFT[name] == each))
    ]


def test_what_a_user_installs_is_permissively_licensed():
    names = [name for name in find_installed("reinforge", ["all"]) if not CUDA.match(name)]
    assert len(names) > 40, names
    assert {"torch", "transformers", "numpy", "aiohttp", "matplotlib"} <= {*names}
    found = {name: find_unacceptable(name, read_licenses(name)) for name in names}
    assert {name: licenses for name, licenses in found.items() if licenses} == {}


@pytest.mark.parametrize(
    "license", ["GPL-3.0-only", "AGPL-3.0", "LGPL-2.1", "SSPL-1.0", "", "UNKNOWN", "Proprietary", "MPL-2.0"]
)
def test_a_license_that_is_not_permissive_is_noticed(license):
    """Mutation check."""
    assert find_unacceptable("a-package", [license]) == [license]


def test_what_the_pages_vendor_is_small_and_comes_with_its_license():
    vendored = files("reinforge.view") / "static" / "vendor"
    names = sorted(each.name for each in vendored.iterdir())
    assert names == ["LICENSE", "uPlot.iife.min.js", "uPlot.min.css"]
    assert (vendored / "LICENSE").read_text().startswith("The MIT License (MIT)")
    assert "https://github.com/leeoniya/uPlot (v1.6.32)" in (vendored / "uPlot.iife.min.js").read_text()[:100]
    pages = [each for folder in (vendored, files("reinforge.view") / "static") for each in folder.iterdir()]
    assert sum(len(each.read_bytes()) for each in pages if each.is_file()) < 400_000
