"""The program that trained the shipped tokenizer."""

from results.lab.corpus import tokenizer


def test_a_tokenizer_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "read_embedded", lambda: ["to be or not to be " * 9])
    trained = tokenizer.train(tmp_path, vocab_size=260)
    assert trained.num_tokens == 260
    (ids,) = trained.encode_batch(["to be"])
    assert len(ids) < 5
    assert trained.decode(ids.tolist()) == "to be"
