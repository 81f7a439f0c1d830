"""`p2pdiloco chaos --scenario`: one survivor, a split that heals."""
