"""The process that trains: model, data, inner optimizer. It knows no peers."""
