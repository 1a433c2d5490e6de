"""A mutation that replaces what is no longer there removes no safety, and its check would pass for another reason."""

import ast
import inspect

from tests.fault import mutations


def find_new_names(tree, names):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "imports", "exec"), names)
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names = {name: value for name, value in names.items() if name not in arguments}
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    owned = [each for each in targets if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)]
    return [
        ast.unparse(each) for each in owned if each.value.id in names and not hasattr(names[each.value.id], each.attr)
    ]


def test_every_mutation_replaces_something_that_is_there():
    for function in ast.parse(inspect.getsource(mutations)).body:
        assert find_new_names(function, dict(vars(mutations))) == []


def test_a_mutation_of_something_that_was_moved_is_found():
    moved = ast.parse("from reinforge.protocols.art.adapter import ARTTrainerAdapter\nARTTrainerAdapter._settle = None")
    assert find_new_names(moved, {}) == ["ARTTrainerAdapter._settle"]
