"""The name of the sources."""

import pytest

from baton.core.build import NAME_LEN, ROOT, build_id, name_of

pytestmark = pytest.mark.fast


@pytest.fixture
def package(tmp_path):
    for room in ("a", "b"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
        (tmp_path / room / "x.py").write_text("1\n")
    return tmp_path


def test_equal_sources_have_equal_names(package, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for path in package.rglob("*.py"):
        target = other / path.relative_to(package)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert name_of(package) == name_of(other)


@pytest.mark.parametrize("change", ["content", "name", "added", "moved"])
def test_any_change_is_seen(package, change):
    before, path = name_of(package), package / "a" / "x.py"
    match change:
        case "content":
            path.write_text("2\n")
        case "name":
            path.rename(package / "a" / "y.py")
        case "added":
            (package / "b" / "y.py").write_text("")
        case "moved":
            (package / "a" / "x.py").write_text("")
            (package / "b" / "x.py").write_text("1\n1\n")
    assert name_of(package) != before


def test_what_is_no_room_does_not_count(package):
    before = name_of(package)
    (package / "tests").mkdir()
    (package / "tests" / "test_x.py").write_text("1\n")
    (package / "a" / "page.md").write_text("1\n")
    assert name_of(package) == before


def test_our_own_name():
    assert len(build_id()) == NAME_LEN
    assert build_id() == build_id()


def test_one_place_asks_for_the_version_of_the_package():
    """Elsewhere it would fail where the sources run without an installation."""
    packages = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    asking = {
        path for package in packages for path in package.rglob("*.py") if 'version("baton-pd")' in path.read_text()
    }
    assert asking == {ROOT / "core" / "build.py"}
