from temper.cli import main

main()
