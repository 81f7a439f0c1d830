"""Controls of a node for the owner of its machine: pause, resume, finish, limits."""
