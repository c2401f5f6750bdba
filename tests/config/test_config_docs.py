"""The pages about the configuration agree with the code."""

import re

from reference_tables import DOCS, default_differences, generated, part


def test_generated_parts_are_up_to_date():
    """`python tests/config/reference_tables.py` renews them."""
    for file, parts in generated().items():
        page = (DOCS / file).read_text(encoding="utf-8")
        for name, text in parts.items():
            assert part(page, name) == text.strip(), f"docs/{file}: run tests/config/reference_tables.py"


def test_every_differing_default_is_listed_with_a_reason_and_no_other():
    page = (DOCS / "defaults.md").read_text(encoding="utf-8").split("## Settings that verl's tree does not have")[0]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines() if "|" in line]
    listed = {row[0]: (row[1], row[2]) for row in rows[2:]}
    assert listed == default_differences()
    assert all(len(row) == 4 and row[3] for row in rows)
