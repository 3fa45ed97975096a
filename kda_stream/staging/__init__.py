"""How bytes move: maps, page-locked slots, checked copies. Knows no KDA and no checkpoint."""
