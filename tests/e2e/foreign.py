"""Exceptions that are not Baton's, raised at any call or await of chosen modules.

The modules' functions get code that asks, before each call and each await, whether this is the point at which to raise.
Nothing else about them changes, and `restore` takes it back.
"""

import ast
import builtins
import importlib
import inspect
import types
from collections import Counter
from hashlib import sha256

NAME = "__foreign__"


class Foreign(Exception):
    """What a library might raise, and Baton has no name for."""


class _Points(ast.NodeTransformer):
    def __init__(self, module, points, names):
        self._module, self._points, self._names = module, points, names
        self._inside, self._nth = [], Counter()

    def _ask(self, node):
        source = ast.unparse(node)
        self.generic_visit(node)
        name = f"{self._module}:{'.'.join(self._inside)}:{source}"
        self._nth[name] += 1
        self._names.append(f"{name}:{self._nth[name]}")
        self._points.append((self._module, node.lineno, source[:80]))
        ask = ast.Call(ast.Name(NAME, ast.Load()), [ast.Constant(len(self._points) - 1)], [])
        return ast.copy_location(ast.BoolOp(ast.Or(), [ask, node]), node)

    visit_Call = visit_Await = _ask

    def visit_FunctionDef(self, node):
        self._inside.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._inside.pop()
        return node

    def visit_ClassDef(self, node):
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class Injection:
    """Of some modules.

    Attributes:
        points: (module, line, source) of each.
        names: of each, by module, function and source: an edit elsewhere changes none.
        seen: which were passed since `watch`.
        fired: whether the armed one has raised.
    """

    def __init__(self, modules):
        self.points, self.names, self.seen = [], [], set()
        self.armed, self.fired, self.is_watching = None, False, False
        self._old = []
        setattr(builtins, NAME, self._pass)
        for module in [importlib.import_module(name) for name in modules]:
            name = module.__name__
            tree = _Points(name, self.points, self.names).visit(ast.parse(inspect.getsource(module)))
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

    def sample(self, number):
        """As many points, always the same ones as long as their functions are: by a digest of their names."""
        return sorted(range(len(self.names)), key=lambda point: sha256(self.names[point].encode()).digest())[:number]

    def restore(self):
        for function, code in reversed(self._old):  # one that is reached on two ways was changed twice
            function.__code__ = code
        setattr(builtins, NAME, lambda point: None)  # closures that were made meanwhile go on asking


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
