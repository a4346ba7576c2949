"""Room on a disk, asked for before a native library writes."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from exporter.bundle import write_bundle
from exporter.errors import BundleError
from exporter.room import MARGIN, require_room, temporary_files_in

LIMITED = """
import resource, sys
from pathlib import Path
from exporter.room import require_room
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
try:
    require_room(Path("."), 2**20)
except OSError as error:
    print(error.errno)
"""


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    for limit, said in ((MARGIN, errno.EFBIG), (2 * MARGIN, None)):
        line = [sys.executable, "-c", LIMITED, str(limit)]
        done = subprocess.run(line, check=True, capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout.strip() == ("" if said is None else str(said)) and not list(tmp_path.iterdir())
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != MARGIN
    with pytest.raises(OSError) as caught:  # more than any disk has
        require_room(tmp_path, 2**60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and not list(tmp_path.iterdir())


def test_it_ends_an_export_with_one_error(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match=r"output b: got .*(disk full|File too large)"),
        write_bundle(tmp_path / "b") as w,
    ):
        require_room(w.path, 2**60)
    assert not list(tmp_path.iterdir())


def test_what_libraries_leave_beside_goes(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    with pytest.raises(ZeroDivisionError), temporary_files_in(tmp_path):
        Path(tempfile.mkdtemp(), "left").write_text("x")
        assert len(list(tmp_path.rglob("left"))) == 1
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir()) and tempfile.gettempdir() == before
