"""Addresses without their credentials."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.utils.urls import is_masked, is_remote, masked, masked_text, scheme_of, without_file_scheme

SECRETS = st.text("abcXYZ019_-%.", min_size=4, max_size=20).map(lambda text: f"q9{text}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a/b.parquet", "s3://bucket/a/b.parquet"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("s3://bucket/a@b:c.parquet", "s3://bucket/a@b:c.parquet"),
        ("sftp://me:pass@host:22/a", "sftp://me:***@host:22/a"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("https://token@host/a", "https://***@host/a"),
        ("https://me:p@ss@host/a?x=1", "https://***@host/a?***"),
        ("HTTPS://host?sig=1", "HTTPS://host?***"),
        ("gs://bucket/a?generation=5", "gs://bucket/a?***"),
        ("data/a.parquet", "data/a.parquet"),
        ("file:///data/a", "file:///data/a"),
    ],
)
def test_credentials_are_replaced_and_nothing_else(url, shown):
    assert masked(url) == shown
    assert masked(shown) == shown


@given(user=SECRETS, password=SECRETS, signature=SECRETS, scheme=st.sampled_from(["https", "s3", "webhdfs"]))
def test_a_text_with_an_address_has_no_secret_of_it(user, password, signature, scheme):
    url = f"{scheme}://{user}:{password}@host/a.parquet?sig={signature}"
    text = masked_text(f"cannot read '{url}' (see {url})")
    assert password not in text.replace(user, "") and signature not in text.replace(user, "")
    assert "host/a.parquet" in text and is_masked(masked(url)) and not is_masked(url)


def test_what_is_elsewhere():
    assert is_remote("s3://b/a") and is_remote("memory://a") and is_remote("HTTP://h/a")
    assert not any(map(is_remote, ["file:///a", "a/b", "org/name@config:split", "C:/a", "://a"]))
    assert scheme_of("GS://b/a") == "gs" and scheme_of("a") is None
    assert without_file_scheme("file:///data/a") == "/data/a" and without_file_scheme("s3://a") == "s3://a"
