"""Exceptions that are not Baton's, raised at any call or await of chosen modules.

The modules' functions get code that asks, before each call and each await, whether this is the point at which to raise.
Nothing else about them changes, and `restore` takes it back.
"""

import ast
import builtins
import importlib
import inspect
import types

NAME = "__foreign__"


class Foreign(Exception):
    """What a library might raise, and Baton has no name for."""


class _Points(ast.NodeTransformer):
    def __init__(self, module, points):
        self._module, self._points = module, points

    def _ask(self, node):
        self.generic_visit(node)
        self._points.append((self._module, node.lineno, ast.unparse(node)[:80]))
        ask = ast.Call(ast.Name(NAME, ast.Load()), [ast.Constant(len(self._points) - 1)], [])
        return ast.copy_location(ast.BoolOp(ast.Or(), [ask, node]), node)

    visit_Call = visit_Await = _ask

    def visit_FunctionDef(self, node):
        node.body = [self.visit(statement) for statement in node.body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class Injection:
    """Of some modules.

    Attributes:
        points: (module, line, source) of each.
        seen: which were passed since `watch`.
        fired: whether the armed one has raised.
    """

    def __init__(self, modules):
        self.points, self.seen = [], set()
        self.armed, self.fired, self.is_watching = None, False, False
        self._old = []
        setattr(builtins, NAME, self._pass)
        for module in [importlib.import_module(name) for name in modules]:
            name = module.__name__
            tree = _Points(name, self.points).visit(ast.parse(inspect.getsource(module)))
            code = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
            found = dict(_functions(code))
            for function in _all_functions(module):
                old = function.__code__
                new = found.get((old.co_qualname, old.co_firstlineno))
                if new is not None and new.co_freevars == old.co_freevars:
                    self._old.append((function, old))
                    function.__code__ = new

    def _pass(self, point):
        if self.is_watching:
            self.seen.add(point)
        if point == self.armed:
            self.armed, self.fired = None, True
            raise Foreign(f"at {self.points[point]}")

    def arm(self, point):
        """The next to pass it meets the exception, once."""
        self.fired, self.armed = False, point

    def restore(self):
        for function, code in self._old:
            function.__code__ = code
        delattr(builtins, NAME)


def _functions(code):
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from _functions(inner)


def _all_functions(module):
    def of(value):
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, staticmethod | classmethod):
            yield from of(value.__func__)
        elif isinstance(value, property):
            for one in (value.fget, value.fset):
                if one is not None:
                    yield from of(one)
        elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner in vars(value).values():
                yield from of(inner)

    for value in list(vars(module).values()):
        yield from of(value)
