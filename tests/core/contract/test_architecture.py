"""docs/architecture.md: its drawing is made from the imports, and its tree is the tree."""

import xml.etree.ElementTree as ElementTree

from tests.architecture_drawing import build_drawing, find_package_imports
from tests.core.contract.test_layering import AROUND, CORE
from tests.generated import assert_page_is


def test_the_drawing_is_made_from_the_imports():
    assert_page_is("docs/images/architecture.svg", build_drawing())


def test_every_package_is_drawn():
    texts = {element.text for element in ElementTree.fromstring(build_drawing()).iter()}
    packages = set().union(*CORE, AROUND) & find_package_imports().keys()
    assert len(packages) > 20
    assert packages <= texts
