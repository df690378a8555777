from distributed_training.settings.errors import UserError


def test_parts_are_joined_into_one_line():
    error = UserError("a is\nwrong.", " because\u2028of b. ", "type\tc")
    assert str(error) == "a is wrong; because of b; type c"


def test_empty_parts_leave_no_separator():
    assert str(UserError("a", fix="b")) == "a; b"
    assert str(UserError("a")) == "a"


def test_exit_code_is_two():
    assert UserError("a").exit_code == 2
    assert isinstance(UserError("a"), ValueError)
