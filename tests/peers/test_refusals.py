"""Every refusal of the integrations: a row each, and none is missed."""

import pytest

pytest.importorskip("trl", reason="needs the extra 'test'")
from tests.refusals import check, integrations

# Checks that no row passes, and the reason.
IN_VERL = "verl calls it: `tests/frameworks/test_verl.py` has it"
UNREACHED = {
    "integrations/verl.py: __init__": IN_VERL,
    "integrations/verl.py: patch_forward_with_backends": IN_VERL,
    "integrations/verl.py: post_init": IN_VERL,
    "integrations/verl.py: forward_step": IN_VERL,
}


@pytest.mark.usefixtures("real_memory")
def test_every_check_refuses():
    check(integrations.TABLE, ["integrations"], UNREACHED)
