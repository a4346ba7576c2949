from exporter.cli.app import main

main()
