# What `cmake --install` puts where: the headers, the archive, the command, and what find_package(Spolia) reads. Nothing
# of it names the prefix, so that the installed tree can be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Spolia)

target_include_directories(spolia INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
install(TARGETS spolia spolia_optim EXPORT SpoliaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS spolia_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY spolia DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h"
        # What tests share.
        PATTERN "test_*" EXCLUDE PATTERN "testing*" EXCLUDE PATTERN "*_testing.h" EXCLUDE PATTERN "random_*" EXCLUDE
        PATTERN "*_examples.h" EXCLUDE)

install(EXPORT SpoliaTargets NAMESPACE Spolia:: DESTINATION ${package_folder})
configure_package_config_file(cmake/SpoliaConfig.cmake.in ${PROJECT_BINARY_DIR}/SpoliaConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/SpoliaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/SpoliaConfig.cmake ${PROJECT_BINARY_DIR}/SpoliaConfigVersion.cmake
        DESTINATION ${package_folder})
