"""Election of a group's syncer: who may hold the office, who stands, who votes."""
