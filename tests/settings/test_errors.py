from distributed_training.settings.errors import UserError


def test_parts_are_joined_into_one_line():
    error = UserError("a is\nwrong.", " because\u2028of b. ", "type\tc")
    assert str(error) == "a is wrong; because of b; type c"
