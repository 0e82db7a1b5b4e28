"""`import fastgrpo.auto`, first in a script, is `fastgrpo.patch_trl()`."""

from fastgrpo.trl.names import patch_trl

patch_trl()
