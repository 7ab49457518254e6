"""Kernels compiled ahead are those that launches look up; processes, and what becomes of them and of what fails."""

import json
import logging
import os
import select
import subprocess
import sys

import pytest

from baton.core.start_phase import FINDING_KERNELS, KERNELS
from baton.kernels import compile_ahead as module
from baton.kernels.compile_ahead import MIN_FORMS, compile_ahead, compile_all
from baton.tests.kernels.file_forms import CrashingForm, FileForm, HangingForm, LoggedForm, PairedForm, RefusedForm

LIMIT_S = 120
NAMES = [str(number) for number in range(MIN_FORMS)]


def compiled(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def asked(monkeypatch):
    """What `compile_all` is called with, which compiles all but forms that refuse."""
    asked = []

    def compile_here(forms, num_processes):
        asked.append(([form.name for form in forms], num_processes))
        for form in forms:
            if not isinstance(form, RefusedForm):
                form.compile()

    monkeypatch.setattr(module, "forms_of", lambda work: work())
    monkeypatch.setattr(module, "compile_all", compile_here)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    return asked


@pytest.mark.fast
def test_what_the_cache_lacks_is_compiled_by_all_processors(tmp_path, asked):
    (tmp_path / "there").touch()
    compile_ahead(lambda: [FileForm(tmp_path, name) for name in ("there", *NAMES)])
    assert asked == [(NAMES, 12)]
    compile_ahead(lambda: [FileForm(tmp_path, name) for name in ("there", *NAMES)])
    assert len(asked) == 1, "all is there"


@pytest.mark.fast
def test_a_start_reports_how_many_kernels_are_compiled(tmp_path, asked):
    phases = []
    for _ in range(2):
        work = [FileForm(tmp_path, name) for name in NAMES]
        compile_ahead(lambda: work, on_phase=lambda *phase: phases.append(phase))  # noqa: B023
    assert phases == [(FINDING_KERNELS, 0, 0), (KERNELS, 0, len(NAMES)), (FINDING_KERNELS, 0, 0)]


@pytest.mark.fast
def test_few_forms_are_left_to_those_who_launch_them(tmp_path, asked):
    compile_ahead(lambda: [FileForm(tmp_path, name) for name in NAMES[1:]])
    assert not asked


@pytest.mark.fast
def test_ranks_of_a_host_share_its_processors(tmp_path, asked, monkeypatch):
    forms = [RefusedForm(tmp_path, name) for name in NAMES]
    for num_ranks, num_processes in ((2, 6), (5, 2), (16, 1)):
        compile_ahead(lambda: forms, num_ranks)
        assert asked.pop() == (NAMES, num_processes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(400)))
    compile_ahead(lambda: forms, 2)
    assert asked.pop() == (NAMES, module.MAX_PROCESSES)


@pytest.mark.fast
def test_what_could_not_be_compiled_is_told(tmp_path, asked, caplog):
    caplog.set_level(logging.INFO)
    forms = [FileForm(tmp_path, name) for name in NAMES]
    compile_ahead(lambda: [*forms, RefusedForm(tmp_path, "refused")])
    assert "1 kernels could not be compiled ahead" in caplog.text
    assert f"compiled {len(NAMES)} kernels in" in caplog.text


@pytest.mark.long
def test_a_form_that_fails_or_ends_its_process_costs_no_other(tmp_path):
    forms = [FileForm(tmp_path, name) for name in NAMES]
    compile_all([RefusedForm(tmp_path, "a"), *forms, CrashingForm(tmp_path, "b")], 2)
    assert compiled(tmp_path) == sorted(NAMES)


@pytest.mark.long
def test_so_many_processes_compile_at_once_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", LIMIT_S)
    os.mkfifo(tmp_path / "fifo")
    compile_all([PairedForm(tmp_path, name) for name in "01"], 2)
    assert compiled(tmp_path) == ["0", "1", "fifo"]
    logs = tmp_path / "logs"
    logs.mkdir()
    compile_all([LoggedForm(logs, name) for name in NAMES], 1)
    assert (logs / "log").read_text() == "begins\nends\n" * len(NAMES)


@pytest.mark.long
def test_processes_end_with_the_one_that_waits_for_them(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    code = (
        "import pathlib, sys; from baton.kernels.compile_ahead import compile_all; "
        "from baton.tests.kernels.file_forms import HangingForm; "
        "compile_all([HangingForm(pathlib.Path(sys.argv[1]), 'never')], 1)"
    )
    worker = subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)])
    files = [os.pidfd_open(int(pid)) for pid in (tmp_path / "fifo").read_text().split()]
    worker.kill()
    worker.wait()
    for file in files:
        ready, _, _ = select.select([file], [], [], LIMIT_S)
        assert ready, "it goes on without its worker"
        os.close(file)


@pytest.mark.long
def test_a_form_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(module, "FORM_LIMIT_S", 1)
    compile_all([HangingForm(tmp_path, "never"), *[FileForm(tmp_path, name) for name in NAMES]], 1)
    assert compiled(tmp_path) == sorted([*NAMES, "fifo"])
    os.close(reader)


@pytest.mark.long
def test_processes_that_do_not_end_are_ended(tmp_path, monkeypatch, caplog):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # so that it can be written to
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    compile_all([HangingForm(tmp_path, "never")], 1)
    assert "kernels were not compiled within" in caplog.text
    os.close(reader)


def launched(folder):
    """What `compiled_ahead` says; Triton's interpreter, in which tests are, compiles nothing."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    text = subprocess.run(
        [sys.executable, "-P", "-m", "baton.tests.kernels.compiled_ahead", "2"],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    ).stdout
    return json.loads(text)


@pytest.mark.long
def test_launches_find_what_was_compiled_ahead_and_so_does_the_next_start(tmp_path):
    first = launched(tmp_path)
    assert len(first["missing"]) >= 12
    assert not first["compiled"], "which launches did not find"
    assert first["loaded"] == first["missing"]
    assert first["elsewhere"] == len(first["missing"]), "a kernel's key differs with the order of kernels"
    assert not first["broken"]
    second = launched(tmp_path)
    assert not second["missing"]
    assert second["loaded"] == first["loaded"]
