"""Loss audits: single contributions of others measured by what they do to the loss."""
