"""docs/reference/xids.md explains what its table says."""

from gpuledger.xids import all_xids
from tests.docs_gen.xids_page import xids_page


def test_every_class_of_the_catalogue_is_explained() -> None:
    explained = xids_page().partition("| XID |")[0]

    assert {xid.category for xid in all_xids() if f"`{xid.category}`" not in explained} == set()
