"""Private names, `_so`, in the source of a program."""

import ast


def is_private(name):
    return (
        isinstance(name, str)
        and name.isidentifier()
        and name.startswith("_")
        and name.strip("_") != ""
        and not name.endswith("__")
    )


def is_dict_of_attributes(node):
    """Whether an expression is `vars(x)` or `x.__dict__`."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def literals(nodes):
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


def named_in_call(node):
    """The attributes that a call names, as `getattr` does."""
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name.endswith(("attr", "attr__", "attrgetter")):
        return literals(node.args)
    if is_dict_of_attributes(getattr(function, "value", None)):
        return [*literals(node.args[:1]), *(x.arg for x in node.keywords)]
    return []


def attributes_of(node):
    """The attributes that a node of a syntax tree names."""
    match node:
        case ast.Attribute():
            return [node.attr]
        case ast.Call():
            return named_in_call(node)
        case ast.Subscript() if is_dict_of_attributes(node.value):
            return literals([node.slice])
        case ast.Compare() if any(map(is_dict_of_attributes, node.comparators)):
            return literals([node.left])
    return []


def private_attributes(tree):
    """Private attributes that are read, written or asked for, by any way."""
    names = [name for node in ast.walk(tree) for name in attributes_of(node)]
    return {name for name in names if is_private(name)}


def definitions_of(node):
    """The names that a node of a syntax tree defines."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(value=ast.Name("self" | "cls"), ctx=ast.Store()):
            return [node.attr]
        case ast.Subscript(ctx=ast.Store()):
            return attributes_of(node)
        case ast.Call() if is_dict_of_attributes(
            getattr(node.func, "value", None)
        ):
            return [x.arg for x in node.keywords]
    return []


def private_definitions(tree):
    """Private names of functions, classes, variables and own attributes.

    An attribute is defined by what assigns it to `self` or `cls`, and not by
    what writes it into another object.
    """
    names = [name for node in ast.walk(tree) for name in definitions_of(node)]
    return {name for name in names if is_private(name)}


def private_strings(tree):
    return set(filter(is_private, literals(ast.walk(tree))))
