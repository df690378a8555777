"""The measurement of a text's way into the cache, on a small one."""

from __future__ import annotations

import json

from results.lab.corpus import text


def test_a_text_is_cached_once_and_mapped_afterwards(tmp_path):
    out = tmp_path / "text.json"
    assert text.main(["1MB", str(out), "--work", str(tmp_path)]) == 0
    found = json.loads(out.read_text())
    first, again, mapped = (found[part] for part in ("first", "again", "mapped"))
    assert found["text_bytes"] == 1_000_000
    assert found["cache_bytes"] > 2 * first["tokens"] > 200_000  # 16 bits each
    assert first["tokens"] == again["tokens"] == mapped["tokens"]
    assert first["memory_mapped"]
    assert mapped["memory_mapped"]
    assert mapped["rss_grew_bytes"] < first["rss_grew_bytes"]
    assert first["most_processes"] == 1
    assert 0 < first["most_pss"] <= first["most_rss"] < 2**30
    assert list(tmp_path.iterdir()) == [out], "text and cache are gone"
