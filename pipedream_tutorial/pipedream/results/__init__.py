"""What keeps the pages true to records and formulas."""
