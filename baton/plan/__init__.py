"""How many workers a load needs: `baton plan`. By formulas and tables; nothing is measured."""
