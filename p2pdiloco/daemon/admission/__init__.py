"""Membership as a run decides it: invites, admissions and the owner's notice, at the door and on the disk."""
