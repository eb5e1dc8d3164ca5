"""The script and its local modules, imported as the job began with them (see `util.kept_code`).

Local is what is neither Python's own nor installed. A module whose file has been removed since is found as well.
Bytecode caches are used only while the file is unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence

from elastic.util.kept_code import KeptCode, KeptFile

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = ("site-packages", "dist-packages")


class KeptFinder(importlib.abc.MetaPathFinder):
    """The first of `sys.meta_path`: the other finders look, and local modules get a loader of kept code."""

    def __init__(self, code: KeptCode) -> None:
        self.code = code
        ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        roots = [*(sysconfig.get_path(name) for name in _PATHS), ours]
        self._not_local = tuple(root + os.sep for root in {*roots, *map(os.path.realpath, roots)})

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = _found_by_others(name, path, target)
        origin = spec.origin if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader else ""
        if spec is not None and not origin and spec.origin is not None:
            return spec  # built in, an extension, or another loader's
        if origin and not self.is_local(origin):
            return spec
        for file in _places(name.rpartition(".")[2], sys.path if path is None else path):
            if file == origin:
                break
            if self.code.find(file) is not None:
                return importlib.util.spec_from_file_location(name, file, loader=self.loader(name, file))
        if spec is not None and origin:
            spec.loader = self.loader(name, origin)
        return spec

    def loader(self, name: str, path: str) -> KeptLoader:
        """Raises OSError if the file is neither kept nor there."""
        loader = KeptLoader(name, path, self.code.keep(path))
        if self.code.problem:
            print(f"elastic: {self.code.problem}", file=sys.stderr)
            self.code.problem = ""
        return loader

    def is_local(self, origin: str) -> bool:
        return not origin.startswith(self._not_local) and not set(_INSTALLED) & set(origin.split(os.sep))


class KeptLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, kept: KeptFile) -> None:
        super().__init__(name, path)
        self._kept = kept

    def get_data(self, path: str) -> bytes:
        return self._kept.source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> types.CodeType | None:
        return self.compiled() if self.announce() else super().get_code(fullname)

    def compiled(self) -> types.CodeType:
        code: types.CodeType = compile(self._kept.source, self.path, "exec", dont_inherit=True)
        return code

    def announce(self) -> bool:
        """Have tracebacks and inspect.getsource show the lines that run. Returns whether the file is another by now,
        and says that."""
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # the compiler reports it
            lines = importlib.util.decode_source(self._kept.source).splitlines(keepends=True)
            # Without a time, linecache does not look at the file.
            linecache.cache[self.path] = (len(self._kept.source), None, lines, self.path)
        if changed := self._kept.changed():
            print(
                f"elastic: {self.path} has changed since this job began, which goes on with what it began with; "
                "to run the new one, stop the job and submit it again",
                file=sys.stderr,
            )
        return changed


def install() -> KeptFinder:
    """Safe to call twice: a fork has what its zygote installed."""
    for finder in sys.meta_path:
        if isinstance(finder, KeptFinder):
            finder.code.load()
            return finder
    finder = KeptFinder(KeptCode.named_by(os.environ))
    finder.code.load()
    sys.meta_path.insert(0, finder)
    return finder


def _places(name: str, folders: Iterable[str]) -> Iterator[str]:
    """Where the file of a module may be, by `PathFinder`'s names and in its order."""
    for folder in folders:
        if isinstance(folder, str):
            here = os.path.join(os.getcwd(), "" if folder == "." else folder)
            yield from (os.path.join(here, name, "__init__.py"), os.path.join(here, f"{name}.py"))


def _found_by_others(
    name: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    others = (f for f in sys.meta_path if not isinstance(f, KeptFinder) and hasattr(f, "find_spec"))
    return next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
