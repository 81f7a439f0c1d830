"""The page of a run: templates, one script, one style sheet, and what is worded for them."""
