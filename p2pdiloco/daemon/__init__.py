"""The process that takes part: it carries out what the core decides."""
