"""What runs when: operations, orders, and which weights they use."""
