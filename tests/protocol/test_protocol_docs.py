"""The snippets of docs/dataproto.md run, one after the other, as a reader would type them."""

import re


def test_snippets_of_the_page_run(repository):
    page = (repository / "docs" / "dataproto.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) >= 6
    namespace: dict = {}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"docs/dataproto.md, snippet {number}", "exec"), namespace)
    assert len(namespace["again"]) == 4
